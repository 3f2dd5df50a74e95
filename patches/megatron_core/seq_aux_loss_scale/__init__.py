"""The sequence auxiliary loss of a router (moe_router_load_balancing_type="seq_aux_loss") with several sequences.

What is wrong (0.16 to 0.18): with calculate_per_token_loss the router multiplies its losses by its tokens, because the
gradient is divided by the tokens of all later. For the sequence auxiliary loss it takes the tokens of one sequence, and
not those of all sequences of the microbatch. So the gradient is too small by the microbatch size: the same rows balance
the experts of a run half as hard with two rows in a microbatch as with one.

The patch multiplies the count by the number of sequences. Nothing happens with one sequence in a microbatch, as packed
rows have, nor without calculate_per_token_loss. Logged values do not change.

The losses of routers are also wrong by the number of ranks, which moe-aux-loss-scale fixes. Either patch does its part
without the other.

Upstream: pull request 5798, in 0.19. Up to 0.15 the count was that of all sequences.

Delete when: megatron-core 0.18 is not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument
from shim.patches._views import view_with

TARGET = "megatron.core.transformer.moe.router:TopKRouter._apply_seq_aux_loss"


def _apply_seq_aux_loss(original: Function) -> Function:
    number_of = argument(original, "bsz")

    @functools.wraps(original)
    def _apply_seq_aux_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        number = number_of((self, *args), kwargs)
        if number == 1 or not self.calculate_per_token_loss:
            return original(self, *args, **kwargs)
        attach = _with_all_tokens(self.attach_and_log_load_balancing_loss, number)
        return original(view_with(self, attach_and_log_load_balancing_loss=attach), *args, **kwargs)

    return _apply_seq_aux_loss


def _with_all_tokens(attach: Function, number: int) -> Function:
    """Attaches the loss with the tokens of this many sequences, where it is given those of one."""

    def attach_and_log_load_balancing_loss(*args: Any, **kwargs: Any) -> Any:
        for name in ("valid_token_count", "aux_loss_scale_num_tokens"):  # the latter on the dev branch
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name] * number
        return attach(*args, **kwargs)

    return attach_and_log_load_balancing_loss


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {TARGET: _apply_seq_aux_loss}
