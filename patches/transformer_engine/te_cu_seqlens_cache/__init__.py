"""Training after an evaluation under torch.inference_mode() in the same shape.

What is wrong (2.0 to 2.20): two caches of offsets know a row by its shape alone, and return tensors of another mode or
device.

1. get_full_cu_seqlens (up to 2.15) keeps the offsets of full rows by batch size and length. An evaluation under
   torch.inference_mode() leaves inference tensors there. FusedAttnFunc of the next training step cannot save them, and
   raises. A second device gets the tensor of the first.
2. _get_cu_seqlens_info_with_cp (from 2.2) keeps the shares of a rank by batch size, length and number of ranks. Fused
   attention with cp_comm_type="p2p" raises in the same way.

PyTorch Lightning validates under torch.inference_mode() by default.

The patch: a tensor that does not fit the device or the mode of the call is not returned. The first time another one is
made, which is kept as long as the patch is applied (1), or in upstream's cache under a longer key (2). Tensors that fit
are upstream's own. Each costs 4 bytes per row of the batch.

Upstream: pull request 2728 (in 2.16) fixed the first. The second is open.

Delete when: _get_cu_seqlens_info_with_cp knows the device and the mode, and no supported release is older.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shim.patches._arguments import Function, argument, replacing

PACKAGE = "transformer_engine.pytorch."
V2_2 = PACKAGE + "dot_product_attention.utils:"
V2_3 = PACKAGE + "attention.dot_product_attention."


def _fits(found: Tensor, device: torch.device) -> bool:
    """Whether a cached tensor may be used here: it lies on this device, and autograd may save it if it has to."""
    there = found.device.type == device.type and device.index in (None, found.device.index)
    return there and (not found.is_inference() or torch.is_inference_mode_enabled())


def _full_cu_seqlens(original: Function) -> Function:
    names = ("batch_size", "max_seqlen", "device")
    batch_size_of, max_seqlen_of, device_of = (argument(original, name) for name in names)
    others: dict[tuple[int, int, torch.device], Tensor] = {}

    @functools.wraps(original)
    def get_full_cu_seqlens(*args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = original(*args, **kwargs)
        device = torch.device(device_of(args, kwargs))
        if _fits(found, device):
            return found
        key = batch_size_of(args, kwargs), max_seqlen_of(args, kwargs), device
        if key not in others:
            with torch.inference_mode(False):
                others[key] = torch.arange(key[0] + 1, dtype=torch.int32, device=device) * key[1]
        return others[key]

    return get_full_cu_seqlens


def _cu_seqlens_info_with_cp(original: Function) -> Function:
    batch_size_of, cu_seqlens_of = argument(original, "batch_size"), argument(original, "cu_seqlens")
    with_batch_size = replacing(original, "batch_size")

    @functools.wraps(original)
    def _get_cu_seqlens_info_with_cp(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        device = cu_seqlens_of(args, kwargs).device
        if _fits(found[0], device):
            return found
        # The batch size is no more than a part of the key.
        key = batch_size_of(args, kwargs), device, torch.is_inference_mode_enabled()
        args, kwargs = with_batch_size(args, kwargs, key)
        return original(*args, **kwargs)

    return _get_cu_seqlens_info_with_cp


BINDINGS: dict[str, dict[str, Callable[[Function], Function]]] = {
    "v2_0": {PACKAGE + "attention:_get_full_cu_seqlens": _full_cu_seqlens},
    "v2_2": {
        V2_2 + "get_full_cu_seqlens": _full_cu_seqlens,
        PACKAGE + "attention:_get_cu_seqlens_info_with_cp": _cu_seqlens_info_with_cp,
    },
    "v2_3": {
        V2_3 + "utils:get_full_cu_seqlens": _full_cu_seqlens,
        V2_3 + "context_parallel:_get_cu_seqlens_info_with_cp": _cu_seqlens_info_with_cp,
    },
    "v2_16": {V2_3 + "context_parallel:_get_cu_seqlens_info_with_cp": _cu_seqlens_info_with_cp},
}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return BINDINGS[variant]
