"""The schedule of overlap_moe_expert_parallel_comm: its routers get the mask of their chunk (2)."""

from __future__ import annotations

import functools
import sys
from typing import Any

from shim.patches._arguments import Function, argument
from shim.patches.megatron_core.router_padding_mask.prediction import rolled, rolls_itself
from shim.patches.megatron_core.router_padding_mask.route import MASK

MOE = "megatron.core.transformer.moe.moe_layer"


def patch_build_callables(original: Function) -> Function:
    """Attention and router of a layer are the first of its functions."""
    layer_of = argument(original, "layer")

    @functools.wraps(original)
    def build_transformer_layer_callables(*args: Any, **kwargs: Any) -> Any:
        (first, *others), backward = original(*args, **kwargs)
        layer = layer_of(args, kwargs)
        if not isinstance(layer.mlp, sys.modules[MOE].MoELayer):
            return [first, *others], backward

        @functools.wraps(first)
        def forward(node: Any, *inputs: Any, **named: Any) -> Any:
            state = node.chunk_state
            if state.padding_mask is None:
                return first(node, *inputs, **named)
            if node.is_mtp and not rolls_itself():
                state.padding_mask = rolled(state.padding_mask, layer.pg_collection.cp, None)
            return MASK.call(state.padding_mask.transpose(0, 1).bool(), first, node, *inputs, **named)

        return [forward, *others], backward

    return build_transformer_layer_callables
