"""The padding mask of layers that are not recomputed.

What is wrong (0.16 and 0.17): a padding mask tells the routers of a mixture of experts which tokens to leave out of the
auxiliary losses, and of the counts behind the expert bias. With recompute_granularity="full" and
recompute_method="block" the first recompute_num_layers layers are recomputed, and TransformerBlock hands them the mask.
All further layers get none: their routers count padding, in silence, and are balanced for it.

The patch hands these layers the mask of the call. Layers that are recomputed get it from upstream, as before. Nothing
changes without a mask, with recompute_method="uniform", and if all layers are recomputed.

Upstream: 0.18 hands the mask to all layers, in megatron.core.recompute (Megatron-LM pull request 4496). The dev branch
still has TransformerBlock's own recompute, with the defect. Multi-token prediction takes a padding mask from 0.18 on
only, and mtp-recompute hands it on.

Delete when: megatron-core 0.17 is not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument
from shim.patches._views import Called, view_with

CHECKPOINTED_FORWARD = "megatron.core.transformer.transformer_block:TransformerBlock._checkpointed_forward"


def _checkpointed_forward(original: Function) -> Function:
    mask_of = argument(original, "padding_mask")

    @functools.wraps(original)
    def _checkpointed_forward(*args: Any, **kwargs: Any) -> Any:
        block, mask = args[0], mask_of(args, kwargs)
        if mask is None or block.config.recompute_method != "block":
            return original(*args, **kwargs)
        # Upstream gets each layer from the block. It sees a view of the block whose layers know the mask.
        view = view_with(block, _get_layer=lambda number: _masked(block._get_layer(number), mask))
        return original(view, *args[1:], **kwargs)

    return _checkpointed_forward


def _masked(layer: Any, mask: Any) -> Called:
    """A layer, called with `mask` [b, s] where the call has none."""

    def call(*args: Any, padding_mask: Any = None, **kwargs: Any) -> Any:
        return layer(*args, padding_mask=mask if padding_mask is None else padding_mask, **kwargs)

    return Called(layer, call)


def probe(module: Any, method: str, models: list[Any]) -> bool | str:
    """See docs/patch-modules.md."""
    config = module.config
    some = config.recompute_method == "block" and config.recompute_num_layers < len(module.layers)
    if not some or config.recompute_granularity != "full" or config.num_moe_experts is None:
        return True  # no layer beside recomputed ones, or none that reads the mask
    return "shim does not try which of its layers get the padding mask"


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {CHECKPOINTED_FORWARD: _checkpointed_forward}
