"""Proof of te-mxfp8-empty-shard.

The weights are Transformer Engine's, and so is the Python code of the cast. Torch stands in for its three kernels. They
refuse what the compiled ones refuse, which follows from mxfp8_scaling.cu and compute_scale.cu.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.patches.transformer_engine._proof_mxfp8 import BLOCK, COLUMNS, ROWS, TENSOR, weight
from shim.testing.layout import Layout
from shim.testing.proof import CannotRunError, Here, proof
from shim.testing.transformer_engine import compiled_ops

LARGEST = 448.0  # of E4M3
BIAS = 127  # of an exponent in E8M0


def largest(shard: Tensor, of_rows: Tensor, of_columns: Tensor, rows: int, columns: int, start: int) -> None:
    """mxfp8_scaling_compute_partial_amax: of 32 elements in a row and in a column, as far as the shard has them."""
    assert shard.dim() == 1
    assert start + shard.numel() <= rows * columns
    assert of_rows.dtype == of_columns.dtype == shard.dtype
    whole = shard.new_zeros(rows * columns)
    whole[start : start + shard.numel()] = shard.abs()
    of_rows.copy_(whole.view(rows, -1, BLOCK).amax(-1))
    of_columns.copy_(whole.view(-1, BLOCK, columns).amax(1))


def scales(chunk_size: int, noop_flag: None, lists: Any) -> None:
    """multi_tensor_compute_scale_inv_e8m0: the powers of two with which the largest values fit."""
    for largest_ones, found in zip(*lists, strict=True):
        assert largest_ones.dtype == torch.bfloat16
        exponents = (largest_ones.float() / LARGEST).log2().ceil().clamp(-BIAS, BIAS)
        found.copy_((exponents + BIAS).to(torch.uint8))


def cast(shard: Tensor, *others: Any) -> None:
    """mxfp8_scaling_partial_cast: the shard by the scales of rows and of columns."""
    by_rows, by_columns, of_rows, of_columns, _rows, _columns, start = others
    assert by_rows.dim() == by_columns.dim() == 1
    assert by_rows.shape == by_columns.shape == shard.shape
    spread = of_rows.repeat_interleave(BLOCK, 1), of_columns.repeat_interleave(BLOCK, 0)
    for target, exponents in zip((by_rows, by_columns), spread, strict=True):
        scale = torch.exp2(exponents.float().flatten()[start : start + shard.numel()] - BIAS)
        target.copy_((shard.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8))


KERNELS: dict[str, Callable[..., None]] = {
    "mxfp8_scaling_compute_partial_amax": largest,
    "multi_tensor_compute_scale_inv_e8m0": scales,
    "mxfp8_scaling_partial_cast": cast,
}


def main_weight() -> Tensor:
    """Of the weight, in fp32, flat."""
    return torch.randn(ROWS * COLUMNS, generator=torch.Generator().manual_seed(0))


def cast_shards(shards: list[tuple[int, int] | None]) -> list[list[int]]:
    """Cast a weight of which each rank owns this shard, from one place to another; the bytes that all ranks have."""
    utils = import_module(TENSOR + "utils") if find_spec(TENSOR + "utils") else None
    if utils is None or not hasattr(utils, "_cast_master_weights_to_fp8_mxfp8_scaling"):
        raise CannotRunError("this release casts no MXFP8 weights")
    whole, quantized = main_weight(), weight()
    mine = shards[torch.distributed.get_rank() % len(shards)]
    main, start = (None, None) if mine is None else (whole[slice(*mine)], mine[0])
    with testing.te_cuda_stand_ins(), compiled_ops(KERNELS):
        utils.cast_master_weights_to_fp8([quantized], [main], [start], torch.distributed.group.WORLD)
    parts = (quantized._rowwise_scale_inv, quantized._columnwise_scale_inv, quantized._rowwise_data)
    return [part.flatten().tolist() for part in parts]


def unlike(one: list[list[int]], other: list[list[int]]) -> int:
    """How many scales differ."""
    return sum(a != b for parts in list(zip(one, other, strict=True))[:2] for a, b in zip(*parts, strict=True))


@proof(
    "{:.0f} scales are wrong",
    right="the scales of the owner",
    defect="crash",
    crashes="^UnboundLocalError: .*master_weight_dtype",
    ranks=2,
    te=True,
)
def a_rank_owns_no_shard(here: Here) -> int:
    """The step of MXFP8 weights crashes on a rank that owns no shard of them, and the other ranks wait.

    To reproduce, on two ranks: call `transformer_engine.pytorch.tensor.utils.cast_master_weights_to_fp8` with one MXFP8
    weight, its main weight on rank 0, and None on rank 1. megatron-core's distributed optimizer does so with
    `fp8_param_gather` and the MXFP8 recipe.

    `_cast_master_weights_to_fp8_mxfp8_scaling` takes the dtype of the first shard, and there is none. Right are the
    scales that rank 0 has. Fixed in 2.20 (pull request 3348). Here torch stands in for the kernels.
    """
    owner, other = here.run(cast_shards, [(0, ROWS * COLUMNS), None], layout=Layout(ep=2))[:2]
    return unlike(owner, other)
