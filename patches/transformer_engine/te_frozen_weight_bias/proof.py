"""Proof of te-frozen-weight-bias. The layers are Transformer Engine's; torch computes their products and norms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shim.patches.transformer_engine._proof_linear_layers import forward_and_backward, kernels, layer_of
from shim.testing.proof import Here, proof

KINDS = ("Linear", "LayerNormLinear", "GroupedLinear", "LayerNormMLP")


def gradients(layer: Any, frozen: bool) -> Mapping[str, Tensor]:
    """The gradients of a step, by name. frozen: all weights of the linear layer are."""
    for name, parameter in layer.named_parameters():
        parameter.grad = None
        parameter.requires_grad_(not (frozen and re.fullmatch(r"(fc\d_)?weight\d*", name)))
    rows = forward_and_backward(layer)
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {name: grad for name, grad in {**found, "rows": rows.grad}.items() if grad is not None}


def lost(kind: str) -> int:
    """How many biases have not the gradient beside frozen weights that they have beside trained ones."""
    with kernels() as te:
        layer = layer_of(te, kind)
        truth, found = gradients(layer, frozen=False), gradients(layer, frozen=True)
        biases = [name for name in truth if re.fullmatch(r"(fc\d_)?bias\d*", name)]
        return sum(name not in found or not torch.allclose(found[name], truth[name], rtol=1e-6) for name in biases)


def lost_in_all() -> int:
    return sum(lost(kind) for kind in KINDS)


@proof("{:.0f} of 6 biases without their gradient", right="each bias has its gradient", te=True)
def biases_beside_frozen_weights_are_trained(here: Here) -> int:
    """A trained bias of a linear layer of Transformer Engine gets no gradient if the weight beside it is frozen.

    To reproduce: `layer = te.Linear(32, 48, bias=True)`, `layer.weight.requires_grad_(False)`, and
    `layer(x).sum().backward()` without FP8. `layer.bias.grad` is None. The same with `te.LayerNormLinear`, with
    `te.GroupedLinear` whose first weight is frozen, and with `fc2_bias` of `te.LayerNormMLP`. Its `fc1_bias` is right.

    The gradient of the bias comes out of the product for the gradient of the weight, which a frozen weight does not
    have. Right is the gradient that the bias has beside a trained weight: the sum over the rows of the output's
    gradient. Seen in 2.1 to 2.20.2. Here torch stands in for the kernels.
    """
    return int(here.run(lost_in_all)[0])
