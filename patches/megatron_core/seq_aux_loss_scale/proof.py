"""Proof of seq-aux-loss-scale."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shim.patches.megatron_core._proof_router_losses import PER_TOKEN, model_of, of_routers, off_by, step
from shim.testing.proof import Here, proof

SEQUENCES: dict[str, Any] = {
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "calculate_per_token_loss": True,
}


def gradient(micro_batch_size: int, options: dict[str, Any], padding: Any = ()) -> Tensor:
    """The gradients of all routers after a step on two rows."""
    wrapped = model_of({**SEQUENCES, **options})
    step(wrapped, padding, micro_batch_size=micro_batch_size)
    return of_routers(wrapped)


def error() -> float:
    return off_by(gradient(2, PER_TOKEN), gradient(1, PER_TOKEN))


@proof("gradient of routers off by {:.1e}", bound=1e-5)
def the_gradient_does_not_depend_on_the_microbatch_size(here: Here) -> float:
    """With calculate_per_token_loss, the sequence auxiliary loss of MoE shrinks with the microbatch size.

    To reproduce: build a GPTModel with `num_moe_experts=4`, `moe_router_load_balancing_type="seq_aux_loss"`,
    `moe_aux_loss_coeff=0.1` and `calculate_per_token_loss=True`. Run a step of `get_forward_backward_func()` with
    `finalize_model_grads` on two rows, and a loss function that returns zero and the number of tokens, so that the
    gradient of the routers is that of their own losses alone. Do so with `micro_batch_size=1` and two microbatches, and
    with `micro_batch_size=2` and one. The second gradient is half as large.

    `_apply_seq_aux_loss` puts the sequences beside the experts, [s, b * E], and counts the s tokens of one. The loss is
    multiplied by that count, and finalize_model_grads divides by the s * b tokens of the microbatch. Right is the
    gradient with one row in a microbatch: the loss is a mean over sequences.

    From 0.16 to 0.18. Megatron-LM pull request 5798 fixes it in 0.19.
    """
    found: float = here.run(error)[0]
    return found
