"""Proofs of reduce-non-contiguous."""

from __future__ import annotations

import torch
from torch import Tensor

from shim.testing import Layout
from shim.testing.proof import Here, Measured, proof

TOKENS, BATCH, HIDDEN, INNER = 6, 2, 8, 16
STEPS, RATE = 12, 1.0


def sample() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and targets, both [s, b, h], and the two weights of an MLP, [h, f] and [f, h], in fp64."""
    generator = torch.Generator().manual_seed(0)
    shapes = (TOKENS, BATCH, HIDDEN), (TOKENS, BATCH, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN)
    hidden, target, up, down = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return hidden, target, up / HIDDEN**0.5, down / INNER**0.5


def mine(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """The parts of this rank, [h, f/tp] and [f/tp, h]."""
    from megatron.core import parallel_state

    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    return up.chunk(size, 1)[rank].clone(), down.chunk(size, 0)[rank].clone()


def alone(hidden: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The MLP with its whole weights, [s, b, h]."""
    return torch.tanh(hidden @ up) @ down


def transposed_after(hidden: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The MLP with the weights of this rank, computed batch first: [s, b, h], summed over ranks after the transpose."""
    from megatron.core import tensor_parallel

    partial = torch.tanh(hidden.transpose(0, 1) @ up) @ down
    return tensor_parallel.reduce_from_tensor_model_parallel_region(partial.transpose(0, 1))


def transposed_before(hidden: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The same, summed before the transpose. What is transposed is the gradient that is to be summed in backward."""
    from megatron.core import tensor_parallel

    states = tensor_parallel.copy_to_tensor_model_parallel_region(hidden).transpose(0, 1)
    return tensor_parallel.reduce_from_tensor_model_parallel_region(torch.tanh(states @ up) @ down).transpose(0, 1)


def losses_on_rank() -> tuple[list[float], list[float]]:
    """Losses of SGD steps: those of the MLP alone, and those on this rank."""
    hidden, target, *whole = sample()
    curves: list[list[float]] = []
    for computed, weights in ((alone, whole), (transposed_after, mine(*whole))):
        weights = [weight.clone().requires_grad_() for weight in weights]
        curves.append([])
        for _ in range(STEPS):
            loss = (computed(hidden, *weights) - target).square().mean()
            gradients = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight -= RATE * gradient
            curves[-1].append(float(loss))
    return curves[0], curves[1]


def gradient_error_on_rank() -> float:
    hidden, target, *whole = sample()
    found = []
    for computed, weights in ((alone, whole), (transposed_before, mine(*whole))):
        states = hidden.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((computed(states, *weights) - target).square().mean(), states)
        found.append(gradient)
    return float((found[1] - found[0]).norm() / found[0].norm())


@proof("losses off by {:.1e}", bound=1e-6, ranks=2)
def a_transposed_tensor_is_summed_over_ranks(here: Here) -> Measured:
    """An all-reduce over tensor-parallel ranks returns its input unreduced if that is not contiguous.

    To reproduce: split the weights of an MLP over two tensor-parallel ranks, compute it batch first, and pass its
    transposed result [s, b, h] to `tensor_parallel.reduce_from_tensor_model_parallel_region`. Train it for some steps,
    and compare the losses with those of the whole weights on one rank.

    `_reduce` sums `input_.contiguous()` and returns `input_`. A contiguous tensor is both at once. Of any other one,
    the sum is thrown away, and each rank goes on with its own part: losses are wrong, and differ between ranks.
    Right would be to return what was summed. Seen from 0.12 to 0.18, and fixed in 0.19 (Megatron-LM issue 5337).
    """
    found = here.run(losses_on_rank, layout=Layout(tp=here.world))
    off = [abs(mine - true) / true for truth, measured in found for true, mine in zip(truth, measured, strict=True)]
    return Measured(max(off), {"truth": found[0][0], "measured": found[0][1]})


@proof("gradient off by {:.1e}", bound=1e-6, ranks=2)
def a_transposed_gradient_is_summed_over_ranks(here: Here) -> float:
    """The gradient of a tensor-parallel region's input is that of one rank if the gradient is not contiguous.

    To reproduce: split the weights of an MLP over two tensor-parallel ranks, pass the hidden states [s, b, h] through
    `tensor_parallel.copy_to_tensor_model_parallel_region`, and transpose them to [b, s, h] for the MLP. Sum its result
    over ranks, and compare the gradient of the hidden states with that of the whole weights on one rank.

    Losses are right. In backward the transpose gives a gradient that is not contiguous. `_reduce` sums a copy of it,
    and returns it as it was. Each rank hands its own part to the layers below. Right would be the sum. Seen from
    0.12 to 0.18, and fixed in 0.19 (Megatron-LM issue 5337).
    """
    return max(here.run(gradient_error_on_rank, layout=Layout(tp=here.world)))
