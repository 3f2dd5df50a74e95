"""The weight of the global auxiliary loss over data-parallel ranks.

What is wrong (0.15 to 0.20): the global auxiliary loss (`moe_router_load_balancing_type="global_aux_loss"`) is one loss
of the tokens of all data-parallel ranks. Each rank has the part of its own tokens, so the loss is the sum of the parts.
Gradients are averaged over data-parallel ranks, which takes the mean of the parts. So experts are balanced less hard
the more data-parallel ranks there are, and moe_aux_loss_coeff means something else in each job.

What the patch does: with the option `sum_over_dp` it multiplies the gradient of the loss by the number of data-parallel
ranks, so that it is that of one rank with all tokens. The value that is logged is right on stock and stays. It costs
three operations on one number in a layer.

The option is off by default, because a fix changes what the coefficient of a running training means: whoever sets it
divides `moe_aux_loss_coeff` by the ranks for the same balance.

Upstream: Megatron-LM issue 3672 (open).

Delete when: the global auxiliary loss of every supported release has the same gradient on any number of data-parallel
ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing

ATTACH = "megatron.core.transformer.moe.router:TopKRouter.attach_and_log_load_balancing_loss"
NAME = "global_load_balancing_loss"  # of the loss in the log


def _attach(original: Function, sums: bool) -> Function:
    name_of = argument(original, "aux_loss_name")
    loss_of, with_loss = argument(original, "aux_loss"), replacing(original, "aux_loss")

    @functools.wraps(original)
    def attach_and_log_load_balancing_loss(*args: Any, **kwargs: Any) -> Any:
        if sums and name_of(args, kwargs) == NAME:
            router, loss = args[0], loss_of(args, kwargs)
            ranks = router.tp_dp_cp_group.size() // router.tp_cp_group.size()
            if ranks > 1:
                # The same value, and its gradient times the ranks.
                args, kwargs = with_loss(args, kwargs, loss + (loss - loss.detach()) * (ranks - 1))
        return original(*args, **kwargs)

    return attach_and_log_load_balancing_loss


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {ATTACH: functools.partial(_attach, sums=options["sum_over_dp"])}
