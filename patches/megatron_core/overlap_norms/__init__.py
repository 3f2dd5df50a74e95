"""Norms in the schedule that overlaps the messages of experts (overlap_moe_expert_parallel_comm).

What is wrong:
1. From 0.16 to 0.20, silent: a layer is run in pieces, and the final norm belongs to the last piece of the last layer
   of the decoder: to the one that combines the tokens of experts. A dense layer has no such piece. If it is the last
   one, as with `moe_layer_freq=2`, the hidden states go to the output layer, or to multi-token prediction, without
   their norm, and the weights of the norm get no gradient.
2. In 0.17 with `fused_residual_rmsnorm`: the norm in front of experts returns the residual beside its output, and the
   schedule gives both to the router: "'tuple' object has no attribute 'dtype'".

What the patch does:
1. It runs the norm of the decoder behind the MLP of a dense layer that is its last.
2. It builds the pieces of a view of the layer whose norm returns the output alone. The residual is the input of the
   norm, which the schedule adds anyway.
Other layers do not change.

Upstream: the first is open; up to 0.15 the norm follows all layers. Pull request 4026 fixes the second, in 0.18.

Delete when: megatron-core norms behind a dense layer as well, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing
from shim.patches._views import view_with

BUILD = "megatron.core.models.gpt.fine_grained_callables:build_transformer_layer_callables"
MOE = "megatron.core.transformer.moe.moe_layer"
MLP = 2  # its place among the pieces of a layer


def _build(original: Function, *, may_return_residual: bool) -> Function:
    """may_return_residual: whether a norm may return the residual as well, which upstream does not take."""
    layer_of, with_layer = argument(original, "layer"), replacing(original, "layer")

    @functools.wraps(original)
    def build_transformer_layer_callables(*args: Any, **kwargs: Any) -> Any:
        layer = layer_of(args, kwargs)
        if isinstance(layer.mlp, sys.modules[MOE].MoELayer):
            if may_return_residual and layer.config.fused_residual_rmsnorm:
                view = view_with(layer, pre_mlp_layernorm=_without_residual(layer.pre_mlp_layernorm))
                args, kwargs = with_layer(args, kwargs, view)
            return original(*args, **kwargs)
        pieces, backward = original(*args, **kwargs)
        return [*pieces[:MLP], _normed(pieces[MLP]), *pieces[MLP + 1 :]], backward

    return build_transformer_layer_callables


def _without_residual(norm: Any) -> Any:
    """A view of the norm, because upstream asks for a module. Its hooks are those of the norm."""

    def forward(states: Any) -> Any:
        found = norm.forward(states)
        return found[0] if isinstance(found, tuple) else found

    return view_with(norm, forward=forward)


def _normed(mlp: Function) -> Function:
    @functools.wraps(mlp)
    def forward(node: Any, *args: Any, **kwargs: Any) -> Any:
        found = mlp(node, *args, **kwargs)
        norm = getattr(node.chunk_state.model.decoder, "final_layernorm", None)
        return found if norm is None or node.is_mtp or not node.is_last_layer else norm(found)

    return forward


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {BUILD: functools.partial(_build, may_return_residual=variant == "v0_17")}
