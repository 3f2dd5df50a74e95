"""Proofs of moe-large-capacity."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shim.patches.megatron_core._proof_experts import step
from shim.testing.proof import Here, proof

MODEL: dict[str, Any] = {
    "num_layers": 1,
    "mtp_num_layers": None,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}
FACTOR, PADDED = "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"


def trained(tokens: int = 8, **options: Any) -> dict[str, Tensor]:
    """The losses of a row, and the gradients of a step by the names of their parameters."""
    losses, gradients = step(tokens, **{**MODEL, **options})
    return {**gradients, "losses": losses}


def off(tokens: int = 8, **options: Any) -> float:
    """The largest difference from a step without a capacity."""
    found, truth = trained(tokens, **options), trained(tokens)
    return max(float((found[name] - grad).abs().max()) for name, grad in truth.items())


def at_twice_the_tokens(padded: bool) -> float:
    options: dict[str, Any] = {FACTOR: 4.0, PADDED: padded}
    return off(**options)


@proof(
    "losses and gradients off by {:.1e}",
    right="they are those without a capacity",
    bound=1e-6,
    defect="crash",
    crashes=r"^RuntimeError: selected index k out of range",
    variants=["v0_12"],
)
def a_large_capacity_drops_nothing(here: Here) -> float:
    """A mixture of experts raises if moe_expert_capacity_factor is above num_moe_experts / moe_router_topk.

    To reproduce: build a GPTModel with `num_moe_experts=4`, `moe_router_topk=2` and `moe_expert_capacity_factor=4.0`,
    and run a step on a row of 8 tokens. The capacity of an expert is 16, and the router asks `torch.topk` for 16 of 8
    tokens: "selected index k out of range". Right is the step without a capacity, as nothing is to be dropped.

    From 0.12 to 0.15. Megatron-LM pull request 2214 fixes it in 0.16.
    """
    found: float = here.run(at_twice_the_tokens, False)[0]
    return found


@proof(
    "losses and gradients off by {:.1e}",
    right="they are those without a capacity",
    bound=1e-6,
    defect="crash",
    crashes=r"^RuntimeError: (selected index k out of range|shape '\[4, 16\]' is invalid for input of size 32)",
)
def experts_padded_to_a_large_capacity_are_trained(here: Here) -> float:
    """The all-to-all dispatcher raises if experts are padded to a capacity above the number of tokens.

    To reproduce: as without padding, with `moe_pad_expert_input_to_capacity=True` and
    `moe_token_dispatcher_type="alltoall"`. From 0.16 on the router keeps the 8 tokens that there are for each expert,
    and the dispatcher cuts them into four times 16. Right is the step without a capacity.

    From 0.12 on.
    """
    found: float = here.run(at_twice_the_tokens, True)[0]
    return found
