"""Multi-token prediction: the mask of a model's call, rolled as the tokens of each depth are (1, 4)."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shim.patches._ambient import Ambient
from shim.patches._arguments import Function, argument, replacing
from shim.patches._views import view_with

MTP = "megatron.core.transformer.multi_token_prediction"
INSIDE = ("transformer_layer", "mtp_model_layer")  # the layer inside one of MTP, up to 0.16 and later


_MASK = Ambient(__name__)  # [b, s] of the model that runs, up to 0.17 of the last depth


def patch_model_forward(original: Function) -> Function:
    """Keeps the mask for the model's MTP."""
    mask_of = argument(original, "padding_mask")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return _MASK.call(mask_of(args, kwargs), original, *args, **kwargs)

    return forward


def rolled(mask: Tensor, group: Any, row: Any) -> Tensor:
    """The mask one depth later. At the end of a row, or of a packed sequence, it stays what it was."""
    codes, _ = sys.modules[MTP].roll_tensor(_codes(mask), -1, -1, group, row)
    return _decoded(codes, mask)


def _codes(mask: Tensor) -> Tensor:
    """2 for a token, 3 for padding: a roll fills with zeros."""
    return mask.to(torch.uint8) + 2


def _decoded(codes: Tensor, mask: Tensor) -> Tensor:
    return torch.where(codes == 0, mask.bool(), codes == 3)


def rolls_itself() -> bool:
    """Whether this release rolls the mask of an MTP layer."""
    layer = sys.modules[MTP].MultiTokenPredictionLayer
    return "padding_mask" in inspect.signature(layer._get_embeddings).parameters


def patch_layer_forward(original: Function) -> Function:
    """Up to 0.17: the layer inside gets the mask of this depth, in a recompute as well."""
    row_of = argument(original, "packed_seq_params")

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _MASK.value is None:
            return original(self, *args, **kwargs)
        mask = _MASK.value = rolled(_MASK.value, self.cp_group, row_of((self, *args), kwargs))
        inside = {name: _masked(getattr(self, name), mask) for name in INSIDE if hasattr(self, name)}
        return original(view_with(self, **inside), *args, **kwargs)

    return forward


def _masked(layer: Any, mask: Tensor) -> Callable[..., Any]:
    return functools.partial(layer, padding_mask=mask)


def patch_block_forward(original: Function) -> Function:
    """From 0.18: the whole mask of the model's call, also under sequence parallelism and in a hybrid model."""
    with_mask = replacing(original, "padding_mask")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if _MASK.value is not None:
            args, kwargs = with_mask(args, kwargs, _MASK.value)
        return original(*args, **kwargs)

    return forward


def patch_get_embeddings(original: Function) -> Function:
    """From 0.18: a roll of the mask that knows the end of a row."""
    mask_of, with_mask = argument(original, "padding_mask"), replacing(original, "padding_mask")

    @functools.wraps(original)
    def _get_embeddings(*args: Any, **kwargs: Any) -> Any:
        mask = mask_of(args, kwargs)
        if mask is None:
            return original(*args, **kwargs)
        args, kwargs = with_mask(args, kwargs, _codes(mask))
        ids, positions, codes, *others = original(*args, **kwargs)
        return (ids, positions, _decoded(codes, mask), *others)

    return _get_embeddings
