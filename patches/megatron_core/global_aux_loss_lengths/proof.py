"""Proof of global-aux-loss-lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.patches.megatron_core._proof_experts import eager
from shim.patches.megatron_core._proof_router_losses import GLOBAL, MODEL
from shim.testing.proof import Here, LacksFeatureError, proof

TOKENS = 12


def router(options: dict[str, Any]) -> Any:
    """The router of a layer of experts, in training."""
    from megatron.core.transformer.moe.router import TopKRouter

    if not hasattr(TopKRouter, "_apply_global_aux_loss"):
        raise LacksFeatureError("this release has no global auxiliary loss")
    model: Any = testing.build_gpt(**{**MODEL, **GLOBAL, **options})
    return model.decoder.layers[0].mlp.router


def gradients(times: Sequence[int], **options: Any) -> list[Tensor]:
    """The gradient that each microbatch gives the router's weight, by its global auxiliary loss alone.

    times: how often each microbatch has the same TOKENS tokens, side by side.
    """
    found, layer = [], router(options)
    hidden = torch.randn(TOKENS, 1, MODEL["hidden_size"], generator=torch.Generator().manual_seed(0))
    for repeated in times:
        layer.weight.grad = None
        with eager():
            probabilities, _ = layer(hidden.repeat(repeated, 1, 1))
            (probabilities * 0).sum().backward()
        found.append(layer.weight.grad.clone())
    return found


def error(times: Sequence[int]) -> float:
    """How far the gradient of a microbatch is from that of the first, of its norm; the worst."""
    first, *others = gradients(times)
    return max(float((other - first).norm() / first.norm()) for other in others)


@proof("gradient of a router off by {:.1e}", bound=1e-5)
def a_long_microbatch_counts_as_a_short_one(here: Here) -> float:
    """The global auxiliary loss depends on how many tokens the microbatches before had.

    To reproduce: call a TopKRouter with `moe_router_load_balancing_type="global_aux_loss"` on 12 tokens, then on the
    same 12 tokens three times side by side, and then on them once, as microbatches of a step. Compare the gradients of
    its weight.

    Each time the experts have the same share of the tokens, and the loss is a mean. `_apply_global_aux_loss` divides
    the mean counts of all microbatches by the tokens of the current one. Right are equal gradients. From 0.15 to 0.20.
    """
    found: float = here.run(error, (1, 3, 1))[0]
    return found
