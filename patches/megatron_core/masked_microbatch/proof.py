"""Proof of masked-microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.testing.proof import Here, proof
from shim.testing.schedules import run_microbatches

TOKENS = 8

# Tokens and loss mask of a microbatch, [1, s] each.
Microbatch = tuple[Tensor, Tensor]


def microbatches(masked: Sequence[bool]) -> list[Microbatch]:
    """A microbatch for each value, with the loss mask zero everywhere where the value is True."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 64, (1, TOKENS), generator=generator) for _ in masked]
    partly = (torch.arange(TOKENS) != 2).float()[None]
    return [(row, torch.zeros(1, TOKENS) if all_of_it else partly) for row, all_of_it in zip(rows, masked, strict=True)]


def losses_of(model: Any, row: Tensor, **given: Tensor) -> Tensor:
    """The loss of each token, [1, s]. given: further arguments of the model."""
    places = torch.arange(TOKENS)[None]
    losses: Tensor = model(row, places, None, labels=row.roll(-1, 1), **given)
    return losses


def gradients(model: Any) -> Tensor:
    """The gradients of all weights, in one vector of fp64."""
    return torch.cat([weight.grad.double().flatten() for weight in model.parameters()])


def scheduled(
    model: Any, batches: Sequence[Microbatch], loss_mask: bool = False
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The gradients of a step of the release's schedule, and what it has logged.

    loss_mask: the model gets the mask too, as multi-token prediction needs it.
    """

    def forward(microbatch: Microbatch, chunk: Any) -> tuple[Tensor, Any]:
        row, mask = microbatch

        def loss_func(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss = (losses * mask).sum()
            return loss, mask.sum().int(), {"loss": loss.detach().clone()}

        return losses_of(chunk, row, **({"loss_mask": mask} if loss_mask else {})), loss_func

    model.zero_grad()
    logged = run_microbatches(model, batches, forward, TOKENS)
    return gradients(model), logged


def truth(model: Any, batches: Sequence[Microbatch]) -> Tensor:
    """The gradients of the mean over microbatches of their mean losses; without a token the mean is zero."""
    model.zero_grad()
    for row, mask in batches:
        if mask.any():
            ((losses_of(model, row) * mask).sum() / mask.sum() / len(batches)).backward()
    return gradients(model)


def error() -> float:
    model = testing.build_gpt(mtp_num_layers=None)
    batches = microbatches([False, True])
    expected = truth(model, batches)
    found, _ = scheduled(model, batches)
    return float((found - expected).norm() / expected.norm())


@proof("gradient off by {:.1e}", bound=1e-6)
def a_masked_microbatch_adds_nothing(here: Here) -> float:
    """A microbatch whose tokens are all masked makes the gradient of every weight NaN.

    To reproduce: run `get_forward_backward_func()` on two microbatches, with a loss function that returns three values:
    the sum of the masked losses, the number of tokens that count, and what is logged. The loss mask of the second
    microbatch is zero everywhere, as it is if a long prompt leaves no room for its answer. Leave
    `calculate_per_token_loss` at False.

    forward_step (forward_step_calc_loss in 0.14) divides the loss by the number of tokens, which is 0 / 0. All
    gradients of the step are NaN afterwards, those of the first microbatch included.

    Right is the gradient of the first microbatch alone, divided by two as there are two microbatches. A microbatch
    without a token adds nothing.

    From 0.12 to 0.14. 0.15 divides by `torch.clamp(num_tokens, min=1)`, by commit 1aef9f8eff.
    """
    found: float = here.run(error)[0]
    return found
