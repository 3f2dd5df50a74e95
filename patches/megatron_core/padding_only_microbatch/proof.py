"""Proof of padding-only-microbatch."""

from __future__ import annotations

from typing import Any

from shim.patches.megatron_core._proof_router_losses import AUX, GLOBAL, TOKENS, gradient
from shim.testing.proof import Here, proof

SEQUENCES: dict[str, Any] = {**AUX, "moe_router_load_balancing_type": "seq_aux_loss"}
PADDING = (TOKENS, 3)  # of two rows, each a microbatch


def lost(options: dict[str, Any]) -> int:
    """How many gradients of routers are NaN after the step."""
    return int(gradient(options, PADDING).isnan().sum())


@proof("{:.0f} gradients of routers are NaN", right="none is NaN", bound=0)
def a_microbatch_of_padding_alone_loses_no_gradient(here: Here) -> float:
    """A microbatch of padding alone makes the gradients of routers NaN.

    To reproduce: build a GPTModel with `num_moe_experts=4`, `moe_router_load_balancing_type="aux_loss"` and
    `moe_aux_loss_coeff=0.1`, or with another of its losses. Run a step of `get_forward_backward_func()` with
    `finalize_model_grads` on two microbatches of one row, with a `padding_mask` that is True for all of the first.

    `switch_load_balancing_loss_func` divides by the square of the number of tokens that are no padding, which is 0.
    Right are the gradients of the other microbatch. From 0.16 to 0.20.
    """
    return float(sum(here.run(lost, options)[0] for options in (AUX, SEQUENCES, GLOBAL)))
