"""0.12 and 0.13: the MTP block rolls everything and computes the loss.

One step: MultiTokenPredictionBlock.forward rolls ids, labels and loss mask once per depth with roll_tensor, and calls a
MultiTokenPredictionLayer in between. The patch opens a step around it. The step tells the rolls the packed row and the
context-parallel group, because these releases pass neither. The layer asserts that the row is unpacked. The patch
passes the packed row to the layer's transformer layer directly (see refused_row).
"""

from __future__ import annotations

import functools
from typing import Any

from shim.patches._arguments import Function, argument, replacing
from shim.patches._views import view_with
from shim.patches.megatron_core._context_parallel_rows import context_parallel_group
from shim.patches.megatron_core.mtp_packed_sequences.refused_row import WithRow
from shim.patches.megatron_core.mtp_packed_sequences.rolls import Options, with_loss_mask
from shim.patches.megatron_core.mtp_packed_sequences.step import group_of, in_step


def patch_block_forward(original: Function, options: Options) -> Function:
    """Opens the step. Without labels, MTP predicts nothing and returns the main model's states unchanged."""
    row_of, labels_of = argument(original, "packed_seq_params"), argument(original, "labels")
    states_of, with_mask = argument(original, "hidden_states"), with_loss_mask(original, options)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        labels = labels_of(args, kwargs)
        if labels is None:
            return states_of(args, kwargs)
        row = row_of(args, kwargs)
        group = group_of(row, context_parallel_group())
        with in_step(row, group=group, counts_divide=True):
            args, kwargs = with_mask(args, kwargs, labels, row, group)
            return original(*args, **kwargs)

    return forward


def patch_layer_forward(original: Function, options: Options) -> Function:
    """Hides the row from the layer, and passes the row to its transformer layer."""
    row_of, put_row = argument(original, "packed_seq_params"), replacing(original, "packed_seq_params")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        row = row_of(args, kwargs)
        if row is None:
            return original(*args, **kwargs)
        layer, *others = args
        told = WithRow(layer.transformer_layer, _by_name, row)
        args, kwargs = put_row((view_with(layer, transformer_layer=told), *others), kwargs, None)
        return original(*args, **kwargs)

    return forward


def _by_name(args: Any, kwargs: Any, row: Any) -> Any:
    """Puts the row by keyword: the layer calls its transformer layer with keywords only."""
    return args, {**kwargs, "packed_seq_params": row}
