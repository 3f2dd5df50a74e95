"""Proofs of te-cross-entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from shim.patches.transformer_engine._proof_cross_entropy import cross_entropy
from shim.testing import Layout
from shim.testing.proof import Here, proof

TOKENS, BATCH, VOCABULARY = 5, 2, 64
NO_TARGET = -100
SMOOTHING = 0.1


def sample() -> tuple[Tensor, Tensor, Tensor]:
    """Logits [s, b, V] in fp32, targets [s, b], and the weights [s, b] of the losses."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, BATCH, VOCABULARY, generator=generator)
    target = torch.randint(0, VOCABULARY, (TOKENS, BATCH), generator=generator)
    return logits, target, torch.rand(TOKENS, BATCH, generator=generator)


def exact_losses(logits: Tensor, target: Tensor) -> Tensor:
    """[s, b] in fp64."""
    picked = logits.log_softmax(-1).gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -picked * (target != NO_TARGET)


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def weighted(device: str) -> float:
    logits, target, weights = (value.to(device) for value in sample())
    exact = logits.double().requires_grad_()
    (right,) = torch.autograd.grad((exact_losses(exact, target) * weights).sum(), exact)
    with cross_entropy(device) as function:
        computed = logits.requires_grad_() * 1
        (gradient,) = torch.autograd.grad((function(computed, target) * weights).sum(), computed)
    return relative(gradient, right)


@proof("gradient off by {:.1e}", bound=1e-6, te=True, devices=("cpu", "cuda"), variants=("v2_2",))
def losses_that_are_weighted(here: Here) -> float:
    """TE's fused cross entropy gives every token the gradient of the first token.

    To reproduce: `losses = parallel_cross_entropy(logits, target)`, then `(losses * weights).sum().backward()` with
    weights that differ, as a loss mask does, and compare with a softmax in fp64.

    Backward reads the gradient of the losses for the first token alone, and multiplies all rows with it. If the first
    token is masked, nothing is trained. Up to 2.4 the result is divided by the number of tokens besides. Wrong in 2.2
    to 2.7, right from 2.8 (pull request 2139).
    """
    return float(here.run(weighted, here.device)[0])


def mean_of_some(device: str) -> float:
    logits, target, _ = (value.to(device) for value in sample())
    target[1, 0] = target[3, 1] = NO_TARGET
    exact = logits.double().requires_grad_()
    expected = exact_losses(exact, target).sum() / (target != NO_TARGET).sum()
    (right,) = torch.autograd.grad(expected, exact)
    with cross_entropy(device) as function:
        computed = logits.requires_grad_() * 1
        loss = function(computed, target, 0.0, True)
        (gradient,) = torch.autograd.grad(loss.sum(), computed)
    return max(float((loss - expected).abs().max() / expected), relative(gradient, right))


@proof("loss or gradient off by {:.1e}", bound=1e-6, te=True, devices=("cpu", "cuda"), variants=("v2_2", "v2_8"))
def mean_over_tokens_with_a_target(here: Here) -> float:
    """The mean of TE's fused cross entropy counts tokens that have no target.

    To reproduce: set some targets to -100, which is ignore_idx, call
    `parallel_cross_entropy(logits, target, reduce_loss=True)`, and compare with
    `torch.nn.functional.cross_entropy(logits, target)` in fp64.

    The sum is divided by the number of all tokens, and so is the gradient. Right would be the number of those with a
    target. Up to 2.3 there is no ignore_idx, and the loss is infinite. Wrong in 2.2 to 2.11, right from 2.12 (pull
    request 2476).
    """
    return float(here.run(mean_of_some, here.device)[0])


def sure_of_the_target(device: str) -> float:
    logits, target, _ = (value.to(device) for value in sample())
    place = target.unsqueeze(-1)
    logits = logits.scatter(-1, place, 11.5).bfloat16()
    exact = logits.double().requires_grad_()
    (right,) = torch.autograd.grad(exact_losses(exact, target).mean(), exact)
    with cross_entropy(device) as function:
        computed = logits.requires_grad_() * 1
        (gradient,) = torch.autograd.grad(function(computed, target, 0.0, True).sum(), computed)
    found, expected = gradient.double().gather(-1, place), right.gather(-1, place)
    return float(((found - expected) / expected).abs().max())


@proof(
    "gradient of a target's logit off by {:.0%}",
    bound=0.01,
    te=True,
    devices=("cpu", "cuda"),
    variants=("v2_2", "v2_8", "v2_12"),
)
def gradients_of_sure_predictions(here: Here) -> float:
    """TE's fused cross entropy loses the gradient of tokens that the model predicts well.

    To reproduce: bf16 logits in which the target stands out, so that its probability p is 0.999, and
    `parallel_cross_entropy(logits, target, reduce_loss=True).backward()`. Compare the gradient of the target's logit
    with a softmax in fp64.

    The gradient is (p - 1) / N. The kernel rounds p / N to bf16, which has 8 bits, and subtracts 1 / N afterwards.
    Nothing is left of the difference: it is zero, or several times too large. Right would be a difference in fp32 that
    is rounded once, which is off by less than 1%. Wrong in 2.2 to 2.17, right from 2.18 (pull request 3193).
    """
    return float(here.run(sure_of_the_target, here.device)[0])


def smoothed() -> float:
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    logits, target, _ = sample()
    mine = logits.chunk(group.size(), -1)[group.rank()].contiguous()
    with cross_entropy("cpu") as function:
        losses = function(mine, target, SMOOTHING, False, group)
    log_p = logits.double().log_softmax(-1)
    picked = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return relative(losses, -((1 - SMOOTHING) * picked + SMOOTHING * log_p.mean(-1)))


@proof("losses off by {:.1e}", bound=1e-6, te=True, ranks=2)
def smoothed_losses_of_two_ranks(here: Here) -> float:
    """TE's fused cross entropy smooths the labels over each rank's own columns.

    To reproduce on two tensor-parallel ranks: `parallel_cross_entropy(logits, target, 0.1, False, group)`, and compare
    with a softmax over all columns in fp64.

    The kernel sums the logits of the columns that the rank has, and adds that sum to the loss as if it were the sum
    over the vocabulary. So the losses of ranks differ. Right would be the sum of all ranks. The gradients are right.
    Wrong in 2.2 to 2.18, right from 2.19 on (pull request 3273).
    """
    return max(here.run(smoothed, layout=Layout(tp=here.world)))
