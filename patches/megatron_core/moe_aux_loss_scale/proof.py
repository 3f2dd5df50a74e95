"""Proofs of moe-aux-loss-scale."""

from __future__ import annotations

from typing import Any

from shim.patches.megatron_core._proof_router_losses import (
    AUX,
    GLOBAL,
    PER_TOKEN,
    ROWS,
    error,
    gradient,
    off_by,
)
from shim.testing import Layout
from shim.testing.proof import Here, proof

BOTH: dict[str, Any] = {**AUX, "moe_z_loss_coeff": 0.01}


@proof("gradient of routers off by {:.1e}", bound=1e-5, ranks=2, variants=["v0_12", "v0_14"])
def losses_of_routers_under_context_parallelism(here: Here) -> float:
    """The gradient of MoE's auxiliary loss and z-loss is too small by the number of context-parallel ranks.

    To reproduce: build a GPTModel with `num_moe_experts=4`, `moe_router_load_balancing_type="aux_loss"`,
    `moe_aux_loss_coeff=0.1` and `moe_z_loss_coeff=0.01`, in DistributedDataParallel. Run a step of
    `get_forward_backward_func()` with `finalize_model_grads`, and a loss function that returns zero, so that the
    gradient of the routers is that of their own losses alone. Do the same on two ranks with `context_parallel_size=2`,
    each with its half of the row. The gradient is half as large.

    Gradients are averaged over context-parallel ranks. The schedules multiply the loss of tokens by their number, but
    set the scale of these losses without it. Right is the gradient of one rank.

    From 0.12 to 0.15. Megatron-LM pull request 2217 fixes it in 0.16.
    """
    return error(here, Layout(cp=here.world), BOTH)


@proof("gradient of routers off by {:.1e}", bound=1e-5, ranks=2, variants=["v0_12", "v0_14", "v0_16"])
def losses_of_routers_with_per_token_loss(here: Here) -> float:
    """With calculate_per_token_loss, the auxiliary loss and the z-loss of MoE are too small under TP and CP.

    To reproduce: build a GPTModel with `num_moe_experts=4`, `moe_router_load_balancing_type="aux_loss"`,
    `moe_aux_loss_coeff=0.1`, `moe_z_loss_coeff=0.01` and `calculate_per_token_loss=True`, in DistributedDataParallel.
    Run a step of `get_forward_backward_func()` with `finalize_model_grads`, and a loss function that returns zero and
    the number of tokens. Do the same on two ranks with `tensor_model_parallel_size=2` and `sequence_parallel=True`, or
    with `context_parallel_size=2`. The gradient of the routers is half as large.

    The router multiplies its losses by the tokens that it has, which are those of its rank. finalize_model_grads
    divides by the tokens of all. Right is the gradient of one rank.

    From 0.12 to 0.18. Megatron-LM pull request 5047 fixes it in 0.19.
    """
    return error(here, Layout(tp=2, sequence_parallel=True), {**BOTH, **PER_TOKEN})


@proof("gradient of routers off by {:.1e}", bound=1e-5, ranks=2, variants=["v0_19"])
def an_auxiliary_loss_with_a_padding_mask(here: Here) -> float:
    """With calculate_per_token_loss and a padding mask, MoE's auxiliary loss is too large under TP and CP.

    To reproduce: build a GPTModel with `num_moe_experts=4`, `moe_router_load_balancing_type="aux_loss"`,
    `moe_aux_loss_coeff=0.1` and `calculate_per_token_loss=True`, in DistributedDataParallel. Run a step of
    `get_forward_backward_func()` with `finalize_model_grads` on rows with a `padding_mask`, and a loss function that
    returns zero and the number of tokens that are no padding. Do the same on two ranks with `context_parallel_size=2`.
    The gradient of the routers is twice as large.

    `get_tokens_per_expert_and_token_count` sums the counts of a rank over the group in place, and reads what the rank
    had afterwards. So the auxiliary loss is multiplied by the tokens of the group and then by the size of the group.
    Right is the gradient of one rank.

    In 0.19. From 0.16 to 0.18 the count is wrong as well, but the size of the group is missing. Megatron-LM pull
    request 7481 is open.
    """
    return error(here, Layout(cp=here.world), {**AUX, **PER_TOKEN}, [3, 1])


@proof("gradient of routers off by {:.1e}", bound=1e-5, ranks=2, variants=["v0_16", "v0_19"])
def a_global_auxiliary_loss_with_a_padding_mask(here: Here) -> float:
    """With calculate_per_token_loss and a padding mask, MoE's global auxiliary loss grows with data-parallel ranks.

    To reproduce: build a GPTModel with `num_moe_experts=4`, `moe_router_load_balancing_type="global_aux_loss"` and
    `moe_aux_loss_coeff=0.1`, on two data-parallel ranks, in DistributedDataParallel. Run a step of
    `get_forward_backward_func()` with `finalize_model_grads` on rows with a `padding_mask`, each with the same number
    of tokens, and a loss function that returns zero. Do the same with `calculate_per_token_loss=True`. As all rows have
    as many tokens, the gradients have to be the same. The second is twice as large.

    `get_tokens_per_expert_and_token_count` sums the counts of a rank over the group in place, and reads what the rank
    had afterwards. So the loss is multiplied by the tokens of all data-parallel ranks.

    From 0.16 to 0.19. Megatron-LM pull request 7481 is open.
    """
    options = {**GLOBAL, "moe_token_dispatcher_type": "allgather"}
    layout, padding = Layout(ep=here.world), [2] * ROWS
    truths = here.run(gradient, options, padding, layout=layout)
    found = here.run(gradient, {**options, **PER_TOKEN}, padding, layout=layout)
    return max(off_by(one, truth) for one, truth in zip(found, truths, strict=True))
