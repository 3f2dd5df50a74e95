"""Proof of padded-seq-aux-loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shim.patches.megatron_core._proof_router_losses import TOKENS, model_of, of_routers, off_by, step
from shim.testing.proof import Here, proof

SEQUENCES: dict[str, Any] = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}
PADDING = (0, TOKENS - 2)  # of two rows


def gradient(micro_batch_size: int, options: Mapping[str, Any], padding: Sequence[int] = PADDING) -> Tensor:
    """The gradients of all routers after a step on two rows with padding."""
    wrapped = model_of({**SEQUENCES, **options})
    step(wrapped, padding, micro_batch_size=micro_batch_size)
    return of_routers(wrapped)


@proof("gradient of routers off by {:.1e}", bound=1e-5)
def padded_rows_are_balanced_as_alone(here: Here) -> float:
    """The sequence auxiliary loss of MoE takes padded rows of a microbatch for rows of equal length.

    To reproduce: build a GPTModel with `num_moe_experts=4`, `moe_router_load_balancing_type="seq_aux_loss"` and
    `moe_aux_loss_coeff=0.1`. Run a step of `get_forward_backward_func()` with `finalize_model_grads` and a loss
    function that returns zero, so that the gradient of the routers is that of their own losses alone. The step has two
    rows, one of 8 tokens and one of 2 and padding, with their `padding_mask`. Do so with `micro_batch_size=1` and two
    microbatches, and with `micro_batch_size=2` and one.

    The loss of a row of n tokens is a sum divided by n * n. `_apply_seq_aux_loss` divides that of each row by the
    square of their mean length. Right is the gradient with one row in a microbatch: the loss is a mean over rows. From
    0.16 to 0.20.
    """
    return off_by(here.run(gradient, 2, {})[0], here.run(gradient, 1, {})[0])
