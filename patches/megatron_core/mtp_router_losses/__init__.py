"""The losses by which routers of multi-token prediction (MTP) balance experts, if one MTP layer serves all depths.

What is wrong (0.17 to 0.19): with mtp_use_repeated_layer one layer predicts all tokens, so its routers run once for
each depth. Upstream divides their losses by the number of depths, for routers that are marked is_mtp_layer.
1. In hybrid models the stack marks its attention and MLA layers, and not its layers of experts. So their losses are not
   divided: with two depths the experts of MTP are balanced twice as hard. The log adds them to those of the decoder's
   layers with the same number.
2. The z-loss is divided for the log only, also in GPT models: the router's gradient is that of all depths.

The patch marks the routers of a MTP layer when the layer is built, and gives them the number of their depth, by which
losses are logged. The z-loss of a marked router is computed with a coefficient that is divided by the depths; the log
does not change by that. Without mtp_use_repeated_layer only the place in the log changes, and in GPT models nothing.

Not covered: models that were built before shim.apply(). The mean in the log is over the layers that a caller counts.

Upstream: pull request 6748 marks the routers on main, and leaves the z-loss as it is, with a note. A router whose
number in the stack is above the number of depths, as in "*E" with one depth, raises an IndexError there. The patch
gives it its place. The dev branch does so by pull request 5042.

Delete when: megatron-core divides the z-loss before it attaches it, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function
from shim.patches._views import view_with

LAYER = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer.__init__"
Z_LOSS = "megatron.core.transformer.moe.router:TopKRouter.apply_z_loss"


def _init(original: Function) -> Function:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for module in self.modules():
            # A router, whose number is its place in the log, behind those of the decoder.
            if hasattr(module, "is_mtp_layer") and hasattr(module, "apply_z_loss"):
                module.is_mtp_layer, module.layer_number = True, self.layer_number

    return __init__


def _apply_z_loss(original: Function) -> Function:
    @functools.wraps(original)
    def apply_z_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        repeated = self.is_mtp_layer and config.mtp_use_repeated_layer and config.mtp_num_layers
        if not repeated or config.moe_z_loss_coeff is None:
            return original(self, *args, **kwargs)
        coefficient = config.moe_z_loss_coeff / config.mtp_num_layers
        router = view_with(self, config=view_with(config, moe_z_loss_coeff=coefficient))
        return original(router, *args, **kwargs)

    return apply_z_loss


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {LAYER: _init, Z_LOSS: _apply_z_loss}
