"""Proofs of te-frozen-experts. The layers are Transformer Engine's; torch computes their products."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shim.patches.transformer_engine._proof_linear_layers import forward_and_backward, kernels, layer_of
from shim.testing.proof import Here, proof


def gradients(layer: Any, frozen: int | None = None, fused: bool = False) -> dict[str, Tensor]:
    """The gradients of a step, by name. frozen: of this expert weight and bias are. fused: into main_grad."""
    for name, parameter in layer.named_parameters():
        parameter.grad = None
        parameter.requires_grad_(frozen is None or not name.endswith(str(frozen)))
        if fused and parameter.requires_grad:
            parameter.main_grad = torch.zeros_like(parameter)
    rows = forward_and_backward(layer)
    found: dict[str, Any] = {"rows": rows.grad}
    for name, parameter in layer.named_parameters():
        found[name] = parameter.main_grad if fused and parameter.requires_grad and "weight" in name else parameter.grad
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def lost(frozen: int, fused: bool) -> float:
    """How far the gradients of the expert that is trained are from those beside a trained one, over their norm."""
    with kernels() as te:
        truth = gradients(layer_of(te, "GroupedLinear"))
        found = gradients(layer_of(te, "GroupedLinear", fuse_wgrad_accumulation=fused), frozen, fused)
        of_trained = [name for name in truth if not name.endswith(str(frozen))]
        off = [found.get(name, torch.zeros(())) - truth[name] for name in of_trained]
        norms = [math.sqrt(sum(float(t.square().sum()) for t in ts)) for ts in (off, [truth[n] for n in of_trained])]
        return norms[0] / norms[1]


@proof("gradients off by {:.1e}", bound=1e-6, te=True)
def experts_behind_a_frozen_one_are_trained(here: Here) -> float:
    """Experts that are trained beside a frozen first one get no gradient in GroupedLinear.

    To reproduce: `layer = te.GroupedLinear(2, 32, 48)`, `layer.weight0.requires_grad_(False)`, and
    `layer(x, [3, 5]).sum().backward()`. `layer.weight1.grad` is None, and nothing says so.

    The forward asks `weights[0].requires_grad` for all weights. Right is the gradient that the second weight has if the
    first is trained, too. Seen in 2.1 to 2.20.2. Here torch stands in for the kernels.
    """
    return float(here.run(lost, 0, False)[0])


@proof(
    "gradients off by {:.1e}",
    bound=1e-6,
    te=True,
    defect="crash",
    crashes=r"^AttributeError: 'Parameter' object has no attribute 'main_grad'",
)
def experts_in_front_of_a_frozen_one_are_trained(here: Here) -> float:
    """With fused accumulation of gradients, a frozen expert behind a trained one ends the step.

    To reproduce: as above with `fuse_wgrad_accumulation=True`, the second weight frozen, and a `main_grad` on the first
    alone, as megatron-core's DistributedDataParallel leaves them. An AttributeError says that a frozen weight has no
    `main_grad`.

    Right is the gradient that the first weight has without fused accumulation. Seen in 2.1 to 2.20.2.
    """
    return float(here.run(lost, 1, True)[0])
