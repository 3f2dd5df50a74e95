"""Proof of frozen-recompute."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shim import testing
from shim.patches.megatron_core._proof_recompute import NORMS
from shim.testing.cpu import storage_shared_in_python
from shim.testing.oracle import Result
from shim.testing.proof import Here, Measured, proof

UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
STEPS, RATE = 8, 0.2


def row() -> testing.PackedRow:
    return testing.pack(testing.random_sequences((5, 7, 4)), align=4)


def adapted(**options: Any) -> nn.Module:
    """A model with frozen weights, and adapters at the four linear layers of each of its two layers: 16 weights."""
    model = testing.build_gpt(mtp_num_layers=None, **options)
    testing.add_lora(model)
    return model


def with_trained_head(**options: Any) -> nn.Module:
    """As `adapted`, and the output layer is trained too."""
    model: Any = adapted(share_embeddings_and_output_weights=False, **options)
    model.output_layer.weight.requires_grad_(True)
    return model


def losses_of_training(model: nn.Module) -> tuple[Result, list[float]]:
    """The first step, and the loss of each step of SGD."""
    first, losses = None, []
    for _ in range(STEPS):
        result = testing.run_packed(model, row())
        first = first or result
        losses.append(float(result.main.mean()))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name in result.grads:
                    weight.sub_(RATE * result.grads[name])
    assert first is not None
    return first, losses


def unequal(found: Result, right: Result) -> int:
    """How many gradients are missing or differ in any bit."""
    same = [name in found.grads and torch.equal(found.grads[name], grad) for name, grad in right.grads.items()]
    return same.count(False)


def two_trainings() -> Measured:
    right, truth = losses_of_training(with_trained_head())
    found, measured = losses_of_training(with_trained_head(**UNIFORM))
    return Measured(unequal(found, right), {"truth": truth, "measured": measured})


@proof("{:.0f} of 17 gradients missing or different", right="bit-equal")
def adapters_behind_frozen_embeddings_are_trained(here: Here) -> Measured:
    """Adapters are silently not trained under full activation recompute, because the embeddings are frozen.

    To reproduce: build a GPTModel with two layers and `recompute_granularity="full"`, `recompute_method="uniform"`,
    `recompute_num_layers=1`. Freeze all weights, add low-rank adapters to the linear layers of the decoder, and train
    these and the output layer. After a step the output layer has a gradient, and none of the 16 adapters has one.

    The output of a checkpoint requires a gradient only if one of its inputs does. Frozen embeddings give hidden states
    that require none, so the whole decoder is cut off. If nothing is trained behind the decoder, backward raises
    "element 0 of tensors does not require grad". Right are the gradients without recompute: a block with trainable
    weights has to make its input require a gradient.

    From 0.12 to 0.20. Open upstream.
    """
    measured: Measured = here.run(two_trainings)[0]
    return measured


def unequal_behind_norms() -> int:
    with storage_shared_in_python():
        return unequal(testing.run_packed(adapted(**NORMS), row()), testing.run_packed(adapted(), row()))


@proof(
    "{:.0f} of 16 gradients missing or different",
    right="bit-equal",
    defect="crash",
    crashes=r"^TypeError: \w+\.forward\(\) missing 1 required positional argument: 'input'|^StopIteration: $"
    # torch 2.12 and earlier
    r"|^RuntimeError: Trying to backward through the graph a second time",
    beside=("fp8-fp4-recompute",),
)
def adapters_behind_recomputed_norms_are_trained(here: Here) -> int:
    """Backward crashes if norms are recomputed in front of adapters, because the embeddings are frozen.

    To reproduce: build a GPTModel with `recompute_granularity="selective"`, `recompute_modules=["layernorm"]`. Freeze
    all weights, add low-rank adapters to the linear layers, and run a step. Backward raises a TypeError about a missing
    argument, from 0.20 on a StopIteration. With torch 2.12 and earlier it raises a RuntimeError: "Trying to backward
    through the graph a second time".

    CheckpointWithoutOutput keeps the inputs of a norm for its recompute only if the norm's output requires a gradient.
    In front of the first adapter nothing requires one, but the adapter behind the norm saves the output, and so asks
    for the recompute. Right are the gradients without recompute: a block with trainable weights has to make its input
    require a gradient.

    From 0.12 to 0.20. Open upstream. From 0.13 on the layers of such a model are those of
    Transformer Engine; without it another error comes first.
    """
    wrong: int = here.run(unequal_behind_norms)[0]
    return wrong
