"""0.12 and 0.13: the MTP block rolls everything and computes the loss.

The story of a step: MultiTokenPredictionBlock.forward rolls ids, labels and loss mask once for each depth, by
roll_tensor, and calls a MultiTokenPredictionLayer in between. The patch opens a step around it. The step tells the
rolls of the row, and of the context-parallel group, because these releases pass neither. The layer asserts that there
is no packed row; its transformer layer gets the row all the same (see refused_row).
"""

from __future__ import annotations

import functools
from typing import Any

from shim.patches._arguments import Function, argument, replacing
from shim.patches.megatron_core.mtp_packed_sequences.refused_row import WithRow, view_of
from shim.patches.megatron_core.mtp_packed_sequences.rolls import Options, with_loss_mask
from shim.patches.megatron_core.mtp_packed_sequences.step import group_of, in_step


def patch_block_forward(original: Function, options: Options) -> Function:
    """Opens the step. Without labels there is nothing to predict, and the main model's states go on as they are."""
    row_of, labels_of = argument(original, "packed_seq_params"), argument(original, "labels")
    states_of, with_mask = argument(original, "hidden_states"), with_loss_mask(original, options)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        labels = labels_of(args, kwargs)
        if labels is None:
            return states_of(args, kwargs)
        row = row_of(args, kwargs)
        group = group_of(row, _context_parallel_group())
        with in_step(row, group=group, counts_divide=True):
            args, kwargs = with_mask(args, kwargs, labels, row, group)
            return original(*args, **kwargs)

    return forward


def _context_parallel_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group() if parallel_state.is_initialized() else None


def patch_layer_forward(original: Function, options: Options) -> Function:
    """Tells the layer of no row, and its transformer layer of the row."""
    row_of, put_row = argument(original, "packed_seq_params"), replacing(original, "packed_seq_params")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        row = row_of(args, kwargs)
        if row is None:
            return original(*args, **kwargs)
        layer, *others = args
        told = WithRow(layer.transformer_layer, _by_name, row)
        args, kwargs = put_row((view_of(layer, transformer_layer=told), *others), kwargs, None)
        return original(*args, **kwargs)

    return forward


def _by_name(args: Any, kwargs: Any, row: Any) -> Any:
    """The layer names all that it passes to its transformer layer."""
    return args, {**kwargs, "packed_seq_params": row}
