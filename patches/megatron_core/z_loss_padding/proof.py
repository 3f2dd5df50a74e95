"""Proofs of z-loss-padding."""

from __future__ import annotations

from typing import Any

from shim.patches.megatron_core._proof_router_losses import AUX, error
from shim.testing import Layout
from shim.testing.proof import Here, proof

# The auxiliary loss is there for its count of tokens, and little of the gradient is its.
OPTIONS: dict[str, Any] = {**AUX, "moe_aux_loss_coeff": 1e-3, "moe_z_loss_coeff": 0.1}
SEQUENCES: dict[str, Any] = {**OPTIONS, "moe_router_load_balancing_type": "seq_aux_loss"}
PADDING = [3, 1]


@proof("gradient of routers off by {:.1e}", bound=1e-5, ranks=2)
def unequal_padding_on_context_parallel_ranks(here: Here) -> float:
    """The z-loss of MoE with a padding mask is the mean over ranks of their means, so that it depends on CP.

    To reproduce: build a GPTModel with `num_moe_experts=4`, `moe_router_load_balancing_type="aux_loss"`,
    `moe_aux_loss_coeff=1e-3` and `moe_z_loss_coeff=0.1`, in DistributedDataParallel. Run a step of
    `get_forward_backward_func()` with `finalize_model_grads` on rows of eight tokens, of which three and one at the end
    are padding, with a `padding_mask` and a loss function that returns zero. Do the same on two ranks with
    `context_parallel_size=2`. The gradients of the routers differ.

    `z_loss_func` divides by the tokens of a rank that are no padding, and `apply_z_loss` by the number of ranks. Right
    is the gradient of one rank: the sum over all ranks, divided by the tokens of all.

    From 0.16 to 0.20. With `calculate_per_token_loss` the means are multiplied by the tokens, which is right.
    """
    return error(here, Layout(cp=here.world), OPTIONS, PADDING)


@proof("gradient of routers off by {:.1e}", bound=1e-5, ranks=2)
def unequal_padding_on_tensor_parallel_ranks(here: Here) -> float:
    """The z-loss of MoE with a padding mask is the mean over ranks of their means, so that it depends on TP.

    To reproduce: as under context parallelism, on two ranks with `tensor_model_parallel_size=2` and
    `sequence_parallel=True`, and with `seq_aux_loss`. The second rank has all of the padding.

    Right is the gradient of one rank. From 0.16 to 0.20.
    """
    return error(here, Layout(tp=here.world, sequence_parallel=True), SEQUENCES, PADDING)
