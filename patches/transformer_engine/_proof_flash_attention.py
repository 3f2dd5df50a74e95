"""Which FlashAttention is chosen, for proofs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from packaging.version import Version

from shim.testing.transformer_engine import te_cuda_stand_ins

FLASH, CUDNN = "2.7.4.post1", (9, 8, 0)
HOMES = ("attention.dot_product_attention.utils", "dot_product_attention.utils", "attention")  # 2.3, 2.2 and 2.1


def home() -> Any:
    """The module of get_attention_backend."""
    import_module("transformer_engine.pytorch")
    names = [f"transformer_engine.pytorch.{name}" for name in HOMES]
    return import_module(next(name for name in names if there(name)))


def there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def installed(module: Any) -> tuple[Any, dict[str, Any]]:
    """Where a release keeps what it has found of FlashAttention 2, and what stands there where it is installed."""
    new = getattr(module, "FlashAttentionUtils", None)
    owner, prefix = (module, "_flash_attn_") if new is None else (new, "")
    flags = {name: True for name in vars(owner) if name.startswith("_flash_attn_2_" if new is None else "v2_")}
    return owner, {f"{prefix}is_installed": True, f"{prefix}version": Version(FLASH), **flags}


@contextlib.contextmanager
def gpu(capability: tuple[int, int], flash: bool = True, fused: bool = False) -> Iterator[None]:
    """A GPU of this compute capability, with or without FlashAttention 2 and a fused attention of cuDNN."""
    module, kernels = home(), import_module("transformer_engine_torch")
    backends: Any = kernels.NVTE_Fused_Attn_Backend
    backend = backends.NVTE_F16_arbitrary_seqlen if fused else backends.NVTE_No_Backend
    answer = (backend, "a stand-in") if hasattr(module, "FusedAttentionParams") else backend  # from 2.20
    with contextlib.ExitStack() as undo:
        undo.enter_context(te_cuda_stand_ins(capability))
        undo.enter_context(mock.patch.object(kernels, "get_fused_attn_backend", lambda *args, **kwargs: answer))
        undo.enter_context(mock.patch.object(module, "get_cudnn_version", lambda: CUDNN))
        owner, values = installed(module)
        for name, value in values.items() if flash else ():
            undo.enter_context(mock.patch.object(owner, name, value))
        yield


def chosen(capability: tuple[int, int], flash: bool = True, fused: bool = False, **params: Any) -> tuple[Any, ...]:
    """What get_attention_backend returns for these AttentionParams: whether flash, its version, whether fused, ..."""
    module = home()
    # By default older releases have the shape of a bias here, which FlashAttention does not take.
    plain = {"qkv_dtype": torch.bfloat16, "attn_mask_type": "causal", "core_attention_bias_shape": None}
    given = {**plain, "core_attention_bias_requires_grad": False, "window_size": (-1, 0), **params}
    with gpu(capability, flash, fused):
        return tuple(module.get_attention_backend(module.AttentionParams(**given)))
