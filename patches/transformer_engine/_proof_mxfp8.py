"""Weights in MXFP8, for proofs."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

TENSOR = "transformer_engine.pytorch.tensor."
ROWS, COLUMNS, BLOCK = 128, 256, 32


def weight(rows: int = ROWS, columns: int = COLUMNS, **extra: Any) -> Any:
    """A weight in MXFP8, bf16 to others, all zeros; rows in multiples of 128, so that no scale is padding."""
    mxfp8 = import_module(TENSOR + "mxfp8_tensor")
    dtypes: Any = import_module("transformer_engine.pytorch.constants")
    kind = getattr(dtypes, "DType", None) or import_module("transformer_engine_torch").DType  # type: ignore[attr-defined, unused-ignore]
    accepted = inspect.signature(mxfp8.MXFP8Tensor.__new__).parameters
    swizzled = {"with_gemm_swizzled_scales": False} if "with_gemm_swizzled_scales" in accepted else {}

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8)

    return mxfp8.MXFP8Tensor(
        (rows, columns),
        torch.bfloat16,
        rowwise_data=zeros(rows, columns),
        rowwise_scale_inv=zeros(rows, columns // BLOCK),
        columnwise_data=zeros(rows, columns),
        columnwise_scale_inv=zeros(rows // BLOCK, columns),
        fp8_dtype=kind.kFloat8E4M3,
        quantizer=mxfp8.MXFP8Quantizer(kind.kFloat8E4M3),
        **swizzled,
        **extra,
    )
