"""0.14 to 0.16: layers roll their inputs, and the model rolls labels and loss mask.

One step: GPTModel._postprocess runs the MTP layers, unless an earlier call did. It then computes the loss of each depth
from rolled labels and a rolled mask. The patch opens a step around it. A layer rolls ids and positions
(_get_embeddings) and then runs _proj_and_transformer_layer, through _checkpointed_forward under full recompute.

0.14, 0.15: the layer asserts that the row is unpacked. _proj_and_transformer_layer gets the packed row directly (see
refused_row), and the rolls use the row of the step. 0.16: the layer takes the row and passes it to the rolls.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from shim.patches._arguments import Function, argument, parameters_of, replacing
from shim.patches._views import view_with
from shim.patches.megatron_core._mtp_layers import has_layout, labels_of_forks, layers_on_earlier_stages
from shim.patches.megatron_core.mtp_packed_sequences.refused_row import WithRow
from shim.patches.megatron_core.mtp_packed_sequences.rolls import Options, with_loss_mask
from shim.patches.megatron_core.mtp_packed_sequences.step import group_of, in_step

INSIDE = "_proj_and_transformer_layer"


def patch_postprocess(original: Function, options: Options) -> Function:
    """Opens the step. With labels=None the model returns logits, without MTP, unless a fork is given labels of MTP."""
    row_of, labels_of = argument(original, "packed_seq_params"), argument(original, "labels")
    states_of, put_states = argument(original, "hidden_states"), replacing(original, "hidden_states")
    mtp_of, put_mtp = argument(original, "mtp_in_postprocess"), replacing(original, "mtp_in_postprocess")
    with_mask, mtp_labels_of = with_loss_mask(original, options), _mtp_labels(original)

    @functools.wraps(original)
    def _postprocess(*args: Any, **kwargs: Any) -> Any:
        model, labels, row = args[0], labels_of(args, kwargs), row_of(args, kwargs)
        if not model.post_process or model.config.mtp_num_layers is None:
            with in_step(row):
                return original(*args, **kwargs)
        labels = mtp_labels_of(args, kwargs) if labels is None else labels
        if labels is None:
            # The states of MTP layers on earlier stages follow those of the main model.
            earlier = _mtp_layers_before(model, here=bool(mtp_of(args, kwargs)))
            args, kwargs = put_states(args, kwargs, states_of(args, kwargs).chunk(1 + earlier, dim=0)[0])
            args, kwargs = put_mtp(args, kwargs, False)
            return original(_without_mtp(model), *args[1:], **kwargs)
        with in_step(row, counts_divide=True):
            args, kwargs = with_mask(args, kwargs, labels, row, group_of(row, model.cp_group))
            return original(*args, **kwargs)

    return _postprocess


def _mtp_labels(original: Function) -> Callable[..., Any]:
    """A getter for the labels of MTP alone, which forks for reinforcement learning take beside labels=None."""
    if "mtp_labels" in parameters_of(original):
        return argument(original, "mtp_labels")
    return labels_of_forks(original) or (lambda args, kwargs: None)


def _mtp_layers_before(model: Any, here: bool) -> int:
    """How many MTP layers earlier pipeline stages ran (possible from 0.16)."""
    if here:
        return layers_on_earlier_stages(model.config, getattr(model, "vp_stage", None))
    return 0 if model.mtp_process or not has_layout(model.config) else model.config.mtp_num_layers


def _without_mtp(model: Any) -> Any:
    """A view of the model with MTP off."""
    # On the last of several stages with MTP the head's own weight is stale; tied embeddings use the embedding's weight.
    weight = model.shared_embedding_or_output_weight
    config = view_with(model.config, mtp_num_layers=None)
    return view_with(model, config=config, mtp_process=False, shared_embedding_or_output_weight=weight)


def patch_layer_forward(original: Function, options: Options) -> Function:
    """0.14, 0.15: hides the row from the layer, and passes it to the method inside, also in a recompute."""
    row_of, put_row = argument(original, "packed_seq_params"), replacing(original, "packed_seq_params")
    inside = vars(vars(sys.modules[original.__module__])["MultiTokenPredictionLayer"])[INSIDE]
    put_inside = replacing(functools.partial(inside, None), "packed_seq_params")  # bound, as the layer calls it

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        row = row_of(args, kwargs)
        if row is None:
            return original(*args, **kwargs)
        layer, *others = args
        told = WithRow(getattr(layer, INSIDE), put_inside, row)
        args, kwargs = put_row((view_with(layer, **{INSIDE: told}), *others), kwargs, None)
        with in_step(row):
            return original(*args, **kwargs)

    return forward
