"""Proof of label-smoothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim.testing import Layout
from shim.testing.proof import Here, proof

TOKENS, BATCH, VOCABULARY = 12, 2, 64
SMOOTHING = 0.1


def sample(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [s, b, V] of all ranks, targets [s, b], and the weights [s, b] of the losses."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(TOKENS, BATCH, VOCABULARY, generator=generator) * 3).to(dtype)
    target = torch.randint(0, VOCABULARY, (TOKENS, BATCH), generator=generator)
    return logits, target, torch.rand(TOKENS, BATCH, generator=generator)


def truth(logits: Tensor, target: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and the gradient of their weighted sum in fp64: 1 - e for the target, e / (V - 1) for each other entry."""
    exact = logits.detach().double().requires_grad_()
    distribution = torch.full_like(exact, SMOOTHING / (VOCABULARY - 1))
    distribution.scatter_(-1, target.unsqueeze(-1), 1 - SMOOTHING)
    losses = -(distribution * exact.log_softmax(-1)).sum(-1)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), exact)
    return losses.detach(), gradient


def mine(whole: Tensor) -> Tensor:
    """The part of the vocabulary that this rank has."""
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    return whole.chunk(size, -1)[parallel_state.get_tensor_model_parallel_rank()].clone()


def error_on_rank() -> float:
    from megatron.core import tensor_parallel

    logits, target, weights = sample()
    computed = mine(logits).requires_grad_() * 1
    losses = tensor_parallel.vocab_parallel_cross_entropy(computed, target, SMOOTHING)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), computed)
    expected_losses, expected = truth(logits, target, weights)
    off: list[Any] = [(losses - expected_losses).abs().max() / expected_losses.abs().max()]
    off.append((gradient - mine(expected)).norm() / mine(expected).norm())
    return float(max(off))


@proof("losses off by {:.1e}", bound=1e-6, ranks=2)
def smoothed_losses_under_tensor_parallelism(here: Here) -> float:
    """Smoothed cross entropy is wrong on more than one tensor-parallel rank.

    To reproduce: call `tensor_parallel.vocab_parallel_cross_entropy(logits, target, label_smoothing=0.1)` on two ranks,
    each with its half of the vocabulary, and compare losses and gradients with those of the whole logits.

    The smoothing is spread over the entries of the rank, and its mean log-probability is never summed over ranks. So
    each rank has another loss, and none is that of one rank. Without tensor parallelism the same call is right.
    """
    return max(here.run(error_on_rank, layout=Layout(tp=here.world)))
