"""Proof of capacity-padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.patches.megatron_core._proof_experts import eager
from shim.patches.megatron_core._proof_features import need_padding_mask
from shim.testing.proof import Here, proof

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "mtp_num_layers": None,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "moe_expert_capacity_factor": 1.0,
}
TOKENS, PADDING = 24, 16


def gradients(padding: int, **options: Any) -> dict[str, Tensor]:
    """Of the weights, after a step on the same tokens with so much padding behind them, whose mask the model gets."""
    need_padding_mask()
    with eager():
        model: Any = testing.build_gpt(**{**MODEL, **options})
        row = torch.zeros(1, TOKENS + padding, dtype=torch.long)
        row[0, :TOKENS] = torch.randint(0, 64, (TOKENS,), generator=torch.Generator().manual_seed(0))
        places = torch.arange(TOKENS + padding)[None]
        losses = model(row, places, None, labels=row.roll(-1, 1), padding_mask=places >= TOKENS)
        losses[0, : TOKENS - 1].sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def off_by(padding: int = PADDING, **options: Any) -> float:
    """How far they are from those without padding, in parts of them."""
    found, right = gradients(padding, **options), gradients(0, **options)
    norm = torch.cat([gradient.flatten() for gradient in right.values()]).norm()
    return float(torch.cat([(found[name] - right[name]).flatten() for name in right]).norm() / norm)


@proof("gradient off by {:.1e}", bound=1e-5)
def padding_takes_no_place_of_an_expert(here: Here) -> float:
    """With moe_expert_capacity_factor, padding takes places of experts, and changes which tokens are dropped.

    To reproduce: build a GPTModel with `num_moe_experts=4`, `moe_router_topk=2` and `moe_expert_capacity_factor=1.0`,
    and run forward and backward on a row that ends in padding, with `padding_mask`. Compare the gradients with those of
    the row without its padding. Attention is causal and padding is in no loss.

    `TopKRouter.routing` has the mask, and calls `apply_router_token_dropping` without it. From 0.16 to 0.20.
    """
    return float(here.run(off_by)[0])
