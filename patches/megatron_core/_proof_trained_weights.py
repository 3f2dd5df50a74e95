"""The weights of a model after steps on tensor-parallel ranks, for proofs of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TOKENS, STEPS, LR = 8, 3, 0.1

# Of each weight by its name: this rank's part after some steps, and the dimension that ranks share, or None.
Weights = dict[str, tuple[Tensor, "int | None"]]


def step(model: Any, seed: int) -> None:
    """A step of SGD on a random row."""
    row = torch.randint(0, 64, (1, TOKENS), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    losses = model(row, torch.arange(TOKENS)[None], None, labels=row.roll(-1, 1), loss_mask=torch.ones(1, TOKENS))
    losses.mean().backward()
    descend(model)


@torch.no_grad()
def descend(model: Any) -> None:
    """Change the weights by their gradients. Ranks that share the tokens sum those of replicated weights."""
    from megatron.core import parallel_state

    for weight in model.parameters():
        if weight.grad is None:
            continue
        if model.config.sequence_parallel and getattr(weight, "sequence_parallel", False):
            torch.distributed.all_reduce(weight.grad, group=parallel_state.get_tensor_model_parallel_group())
        weight -= LR * weight.grad


def trained_weights(model: Any, step: Callable[[Any, int], None] = step) -> Weights:
    for seed in range(STEPS):
        step(model, seed)
    return {
        name: (weight.detach(), weight.partition_dim if getattr(weight, "tensor_model_parallel", False) else None)
        for name, weight in model.named_parameters()
    }


def distance(ranks: list[Weights], expected: Weights) -> float:
    """How far the weights of the ranks are from those of one rank, at most, over their length."""
    off = 0.0
    for name, (whole, _) in expected.items():
        parts, dim = [rank[name][0] for rank in ranks], ranks[0][name][1]
        for found in parts if dim is None else [torch.cat(parts, dim)]:
            off = max(off, float((found - whole).norm() / whole.norm()))
    return off
