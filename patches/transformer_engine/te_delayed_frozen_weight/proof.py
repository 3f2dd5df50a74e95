"""Proof of te-delayed-frozen-weight. The layers are Transformer Engine's; torch computes their products and norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim.patches.transformer_engine._proof_linear_layers import forward_and_backward, kernels, layer_of
from shim.testing.proof import Here, LacksFeatureError, proof

FROZEN = {"Linear": "weight", "LayerNormLinear": "weight", "LayerNormMLP": "fc1_weight"}


def gradients(layer: Any, frozen: str = "") -> dict[str, Tensor]:
    """The gradients of a step whose products of weights wait for backward_dw. frozen: the name of a weight."""
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name != frozen)
    forward_and_backward(layer)
    layer.backward_dw()
    return {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}


def wrong() -> int:
    """How many gradients of weights beside a frozen one are not those beside a trained one."""
    with kernels() as te:
        if not hasattr(te.Linear, "backward_dw"):
            raise LacksFeatureError("no module delays its weight gradients")
        count = 0
        for kind, frozen in FROZEN.items():
            truth = gradients(layer_of(te, kind, delay_wgrad_compute=True))
            found = gradients(layer_of(te, kind, delay_wgrad_compute=True), frozen)
            right = {name: gradient for name, gradient in truth.items() if "weight" in name and name != frozen}
            count += sum(name not in found or not torch.equal(found[name], right[name]) for name in right)
            count += frozen in found
        return count


@proof(
    "{:.0f} gradients are not right",
    right="the gradients of trained weights alone",
    te=True,
    defect="crash",
    crashes=r"^RuntimeError: Pop empty queue",
)
def a_step_beside_a_frozen_weight_delays_nothing(here: Here) -> int:
    """backward_dw() cannot run beside a frozen weight.

    To reproduce: `layer = te.Linear(32, 48, delay_wgrad_compute=True)`, `layer.weight.requires_grad_(False)`, and
    `layer(x).sum().backward()` with `layer.backward_dw()` behind: "Pop empty queue". The same with
    `te.LayerNormLinear`, and with `te.LayerNormMLP` if either weight is frozen.

    Right is a call that leaves the frozen weight without a gradient, and gives the others theirs. Seen in 2.3 to
    2.20.2. Here torch stands in for the kernels.
    """
    return int(here.run(wrong)[0])
