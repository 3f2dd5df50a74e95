"""Proofs of frozen-weight-bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shim import testing
from shim.testing.oracle import Result
from shim.testing.proof import Here, Measured, proof

STEPS, RATE = 8, 0.5
LAYER = ".linear_qkv."


def row() -> testing.PackedRow:
    return testing.pack(testing.random_sequences((5, 7, 4)), align=4)


def model_of(frozen: tuple[str, ...] = (), **options: Any) -> nn.Module:
    """A model with the biases of Qwen2: two layers, whose linear_qkv has one. frozen: parts of names."""
    model = testing.build_gpt(mtp_num_layers=None, add_qkv_bias=True, **options)
    for name, weight in model.named_parameters():
        weight.requires_grad_(not any(part in name for part in frozen))
    return model


def of_biases(result: Result) -> dict[str, torch.Tensor]:
    """The gradients of the biases of linear_qkv, by name."""
    return {name: grad for name, grad in result.grads.items() if name.endswith(LAYER + "bias")}


def lost(**options: Any) -> float:
    """How many of the two biases beside a frozen weight have not the gradient that they have beside a trained one."""
    truth = of_biases(testing.run_packed(model_of(**options), row()))
    found = of_biases(testing.run_packed(model_of((LAYER + "weight",), **options), row()))
    close = [name in found and torch.allclose(found[name], grad, rtol=0, atol=1e-6) for name, grad in truth.items()]
    assert len(close) == 2 and all(grad.abs().max() > 1e-4 for grad in truth.values())
    return float(close.count(False))


def losses_of_training(model: nn.Module) -> list[float]:
    """The loss of each step of SGD on the biases alone."""
    losses = []
    for _ in range(STEPS):
        result = testing.run_packed(model, row())
        losses.append(float(result.main.mean()))
        with torch.no_grad():
            for name, grad in of_biases(result).items():
                model.get_parameter(name).sub_(RATE * grad)
    return losses


def bias_only_training() -> Measured:
    truth = losses_of_training(model_of())
    found = losses_of_training(model_of((LAYER + "weight", "embedding", "norm", "linear_proj", "mlp")))
    return Measured(max(abs(a - b) for a, b in zip(found, truth, strict=True)), {"truth": truth, "measured": found})


@proof("losses off by {:.1e}", bound=1e-6)
def biases_alone_are_trained(here: Here) -> Measured:
    """A trained bias of ColumnParallelLinear gets no gradient if the weight beside it is frozen.

    To reproduce: build a GPTModel with `add_qkv_bias=True`, freeze all parameters but the biases of `linear_qkv`, and
    run forward and backward. `linear_qkv.bias.grad` is None, and nothing says so. Train some steps: the loss stays.

    `LinearWithFrozenWeight.backward` returns None for the bias, whether it is trained or not. Right is the gradient
    that the same bias has beside a trained weight. RowParallelLinear adds its bias outside, and is right. From 0.12 to
    0.20.
    """
    measured: Measured = here.run(bias_only_training)[0]
    return measured


@proof("{:.0f} of 2 biases of a rank without their gradient", right="gradients of both biases", ranks=2)
def biases_have_their_gradients_under_sequence_parallelism(here: Here) -> float:
    """The same under tensor and sequence parallelism, where each rank has its part of the bias.

    To reproduce: as above, with `tensor_model_parallel_size=2` and `sequence_parallel=True`, and `linear_qkv.weight`
    alone frozen. Right is the gradient beside a trained weight, on the same ranks.
    """
    layout = testing.Layout(tp=here.world, sequence_parallel=True)
    return max(here.run(lost_in_layout, layout=layout))


def lost_in_layout() -> float:
    return lost(sequence_parallel=True)
