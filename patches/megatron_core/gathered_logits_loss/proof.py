"""Proof of gathered-logits-loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.testing.proof import Here, proof

TOKENS = 16


def trained(gathered: bool, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """(losses [1, s], gradients of this rank's weights) of a step with gathered logits or without."""
    model = testing.build_gpt(**options)
    row = torch.arange(TOKENS)[None] * 5 % 64
    places = torch.arange(TOKENS)[None]
    losses = model(row, places, None, labels=row.roll(-1, 1), runtime_gather_output=gathered)
    losses.mean().backward()
    return losses.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def distance(mine: Tensor, right: Tensor) -> float:
    return float((mine - right).norm() / right.norm())


def effect_of_gathering(options: dict[str, Any]) -> float:
    """How far losses and gradients move, over the size of the right ones."""
    losses, grads = trained(True, **options)
    right_losses, right_grads = trained(False, **options)
    return max(distance(losses, right_losses), *(distance(grads[name], right) for name, right in right_grads.items()))


@proof("losses or gradients off by {:.1e}", bound=1e-6, ranks=2)
def gathered_logits_have_the_loss_of_their_parts(here: Here) -> float:
    """Losses and gradients are wrong if the logits are gathered over tensor-parallel ranks.

    To reproduce: on two tensor-parallel ranks call a GPTModel with labels, once as it is and once with
    `runtime_gather_output=True` (or build it with `parallel_output=False`). Compare losses and gradients.

    `compute_language_model_loss` takes the gathered logits for this rank's part of the vocabulary. Every rank counts
    all logits in the denominator, which is then too large, and the second rank looks for its targets behind its own.

    Right are the losses and gradients without the gather: both say the same of the same model.
    """
    return max(here.run(effect_of_gathering, {"mtp_num_layers": None}, layout=testing.Layout(tp=2)))
