"""Proof of mtp-gather-gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.testing import Layout
from shim.testing.proof import Here, proof

TOKENS, STEPS, LR = 8, 3, 0.1

# Of each weight by its name: this rank's part after some steps, and the dimension that ranks share, or None.
Weights = dict[str, tuple[Tensor, "int | None"]]


def build(sequence_parallel: bool = False, **overrides: Any) -> Any:
    """A model with one layer of multi-token prediction."""
    return testing.build_gpt(num_layers=1, mtp_num_layers=1, sequence_parallel=sequence_parallel, **overrides)


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


def trained(sequence_parallel: bool) -> Weights:
    return trained_weights(build(sequence_parallel))


def distance(ranks: list[Weights], expected: Weights) -> float:
    """How far the weights of the ranks are from those of one rank, at most, over their length."""
    off = 0.0
    for name, (whole, _) in expected.items():
        parts, dim = [rank[name][0] for rank in ranks], ranks[0][name][1]
        for found in parts if dim is None else [torch.cat(parts, dim)]:
            off = max(off, float((found - whole).norm() / whole.norm()))
    return off


def error(here: Here, sequence_parallel: bool) -> float:
    (expected,) = here.run(trained, False)
    return distance(here.run(trained, sequence_parallel, layout=Layout(tp=here.world)), expected)


@proof("weights off by {:.1e}", bound=1e-5, ranks=2)
def multi_token_prediction_trains_as_on_one_rank(here: Here) -> float:
    """Multi-token prediction trains with gradients that are too large by the tensor-parallel size.

    To reproduce: train a GPTModel with `mtp_num_layers=1` on two tensor-parallel ranks, some steps of SGD, and compare
    the weights with those of one rank. `eh_proj.weight` is the first to differ: its gradient is twice as large.

    MultiTokenPredictionLayer.forward gathers the output of eh_proj with
    all_gather_last_dim_from_tensor_parallel_region, whose backward is a reduce-scatter. The gradient is the same on all
    ranks there, so the sum is TP times the gradient. It flows on into the norms before eh_proj, into the embedding and
    into the main model.

    Right is gather_from_tensor_model_parallel_region, whose backward takes the rank's part of the gradient.

    In 0.12. 0.13 has the right gather, by commit 06e9f28b30.
    """
    return error(here, sequence_parallel=False)


@proof("weights off by {:.1e}", bound=1e-5, ranks=2)
def multi_token_prediction_trains_alike_under_sequence_parallelism(here: Here) -> float:
    """The same with `sequence_parallel=True`.

    To reproduce: as without sequence parallelism. The layer scatters the gathered states along the sequence, and the
    backward of that gathers the gradients of all tokens on each rank, so they are also the same on all ranks here.
    """
    return error(here, sequence_parallel=True)
