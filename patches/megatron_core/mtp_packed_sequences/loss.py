"""From 0.17: the loss is in a function of its own, process_mtp_loss, which trainers call too.

One step: the model (GPTModel._postprocess, or the forward of a hybrid model) runs the MTP layers and calls
process_mtp_loss, which rolls labels and loss mask for each depth. Upstream passes the row everywhere, so the step only
keeps the row's index for all rolls. From 0.18 on a layer also rolls a padding mask for the router (_get_embeddings).
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor

from shim.patches._arguments import Function, argument, replacing
from shim.patches.megatron_core.mtp_packed_sequences.rolls import Options, with_loss_mask
from shim.patches.megatron_core.mtp_packed_sequences.step import group_of, in_step, index_of, roll_row


def patch_model_step(original: Function, options: Options) -> Function:
    """Opens the step of a model."""
    row_of = argument(original, "packed_seq_params")

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        with in_step(row_of(args, kwargs)):
            return original(*args, **kwargs)

    return step


def patch_process_mtp_loss(original: Function, options: Options) -> Function:
    """Without a loss mask, valid tokens count and padding does not."""
    known = inspect.signature(original).parameters
    row_of, group_from = argument(original, "packed_seq_params"), argument(original, "cp_group")
    labels_of, with_mask = argument(original, "labels"), with_loss_mask(original, options)
    ids_of = argument(original, "input_ids") if "input_ids" in known else lambda args, kwargs: None

    @functools.wraps(original)
    def process_mtp_loss(*args: Any, **kwargs: Any) -> Any:
        labels, row = labels_of(args, kwargs), row_of(args, kwargs)
        like = labels if labels is not None else ids_of(args, kwargs)
        if like is None:
            return original(*args, **kwargs)  # nothing to predict and nothing to roll
        with in_step(row):
            args, kwargs = with_mask(args, kwargs, like, row, group_of(row, group_from(args, kwargs)))
            return original(*args, **kwargs)

    return process_mtp_loss


def patch_get_embeddings(original: Function, options: Options) -> Function:
    """From 0.18: padding stays padding for the router. A plain roll would turn some of it into tokens."""
    row_of, mask_of = argument(original, "packed_seq_params"), argument(original, "padding_mask")
    put_mask = replacing(original, "padding_mask")

    @functools.wraps(original)
    def _get_embeddings(*args: Any, **kwargs: Any) -> Any:
        row, mask = row_of(args, kwargs), mask_of(args, kwargs)
        if row is None or mask is None:
            return original(*args, **kwargs)
        args, kwargs = put_mask(args, kwargs, None)
        input_ids, position_ids, _, *rest = original(*args, **kwargs)
        rolled = _rolled_padding(args[0], row, mask, input_ids.size(-1), options["partition"])
        return (input_ids, position_ids, rolled, *rest)

    return _get_embeddings


def _rolled_padding(layer: Any, row: Any, mask: Tensor, length: int, partition: str) -> Tensor:
    group = group_of(row, layer.cp_group)
    padding = ~index_of(row, length, mask.device, group, partition).valid
    if mask.size(-1) == length:
        return roll_row(mask, -1, -1, row, group, partition) | padding
    # Under sequence parallelism this rank holds one share of the tokens, and their neighbours are on other ranks.
    share = mask.size(-1)
    return mask | padding.narrow(0, layer.tp_group.rank() * share, share)
