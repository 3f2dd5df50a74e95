"""Proof of hybrid-frozen-norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shim import testing
from shim.patches.megatron_core._proof_recompute import NORMS
from shim.testing.cpu import storage_shared_in_python
from shim.testing.proof import Here, proof


def adapted_hybrid(part: str = "", **options: Any) -> nn.Module:
    """A hybrid model of attention, MLP, attention and MLP, with frozen weights and 16 weights of adapters.

    part: of the names of the adapters that are trained.
    """
    # As these models are by default. 0.13 cannot build the rotary table.
    model = testing.build_hybrid("*-*-", position_embedding_type="none", **options)
    testing.add_lora(model)
    for name, weight in model.named_parameters():
        weight.requires_grad_(".lora." in name and part in name)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By name, those of a step on one row."""
    row = torch.arange(8)[None]
    model(row, row, None, labels=row).mean().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def unequal(found: dict[str, Tensor], right: dict[str, Tensor]) -> int:
    """How many gradients are missing or differ in any bit."""
    return sum(name not in found or not torch.equal(found[name], gradient) for name, gradient in right.items())


def unequal_behind_norms() -> int:
    with storage_shared_in_python():
        return unequal(gradients(adapted_hybrid(**NORMS)), gradients(adapted_hybrid()))


@proof(
    "{:.0f} of 16 gradients missing or different",
    right="bit-equal",
    defect="crash",
    crashes=r"^TypeError: \w+\.forward\(\) missing 1 required positional argument: 'input'|^StopIteration: $"
    # torch 2.12 and earlier
    r"|^RuntimeError: Trying to backward through the graph a second time",
    beside=("fp8-fp4-recompute",),
)
def adapters_of_a_hybrid_model_behind_recomputed_norms_are_trained(here: Here) -> int:
    """Backward of a hybrid model with frozen embeddings crashes if norms are recomputed in front of adapters.

    To reproduce: build a HybridModel (MambaModel up to 0.17) with `recompute_granularity="selective"`,
    `recompute_modules=["layernorm"]`, whose first layer with adapters has a separate norm, as layers of experts have.
    Here attention and MLP layers with separate norms stand for them. Freeze all weights, add low-rank adapters to the
    linear layers, and run a step. Backward raises a TypeError about a missing argument, from 0.20 on a StopIteration.
    With torch 2.12 and earlier it raises a RuntimeError: "Trying to backward through the graph a second time".

    CheckpointWithoutOutput keeps the inputs of a norm for its recompute only if the norm's output requires a gradient.
    In front of the first adapter nothing requires one, but the adapter behind the norm saves the output, and so asks
    for the recompute. Right are the gradients without recompute.

    From 0.13 to 0.20. Open upstream.
    """
    wrong: int = here.run(unequal_behind_norms)[0]
    return wrong
