"""Proofs of te-delayed-wgrad."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim.patches.transformer_engine._proof_linear_layers import forward_and_backward, kernels, layer_of
from shim.testing.proof import Here, LacksFeatureError, proof

INPUTS, OUTPUTS = 3, 2
ROWS = (1.0, 3.0)  # the values of an input; every gradient of an output is one


def product(x: Tensor, of_output: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a weight [out, in] and of a bias [out]."""
    return of_output.t() @ x, of_output.sum(0)


def product_of_2_3(x: Tensor, of_output: Tensor) -> tuple[Tensor | None, ...]:
    """With two results more of the matrix product."""
    return *product(x, of_output), None, None


@contextlib.contextmanager
def modules_on(device: str) -> Iterator[Any]:
    """transformer_engine.pytorch, whose modules can be made here and delay their gradients."""
    te: Any = import_module("transformer_engine.pytorch")
    if not hasattr(te.Linear, "backward_dw"):
        raise LacksFeatureError("this Transformer Engine delays no gradients")
    if device != "cpu":
        yield te
        return
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),  # modules ask, and then only want a device
        mock.patch.object(torch.cuda, "get_rng_state", lambda *args: torch.zeros(1)),
        mock.patch.object(torch.cuda.nvtx, "range_push", lambda *args: 0),
        mock.patch.object(torch.cuda.nvtx, "range_pop", lambda *args: 0),
    ):
        yield te


def delay(module: Any, value: float) -> None:
    """What its backward leaves for backward_dw()."""
    device = module.weight.device
    rows = [torch.full((1, INPUTS), value, device=device), torch.ones(1, OUTPUTS, device=device)]
    names = inspect.unwrap(type(module).backward_dw).__code__.co_varnames
    module.wgrad_store.put(rows, product_of_2_3 if "grad_bias_" in names else product)


def wrong(device: str, tied: bool) -> float:
    """How far the gradients of weight and bias are from their sums, the larger one."""
    how = {"device": device, "params_dtype": torch.float32, "delay_wgrad_compute": True}
    with modules_on(device) as te:
        modules = [te.Linear(INPUTS, OUTPUTS, bias=True, **how) for _ in ROWS]
        weight, bias = modules[0].weight, modules[0].bias
        modules[1].weight, modules[1].bias = weight, bias
        for module, value in zip(modules if tied else modules[:1] * 2, ROWS):
            delay(module, value)
            module.backward_dw()
    return max(float((weight.grad - sum(ROWS)).abs().max()), float((bias.grad - len(ROWS)).abs().max()))


@proof("gradients off by {:.0f} of 4 and 2", te=True, devices=("cpu", "cuda"))
def two_microbatches(here: Here) -> float:
    """backward_dw() does not add to the gradient that is there.

    To reproduce: `te.Linear(..., delay_wgrad_compute=True)`, and twice `module(x).sum().backward()` with
    `module.backward_dw()` behind, as for two microbatches. Compare the gradients with those of a module that delays
    nothing.

    The gradient of the weight is that of the last call from 2.8 on, and up to 2.7 that of the first; the bias has that
    of the first call. Right would be their sums. Seen in 2.3 to 2.20.2.
    """
    return float(here.run(wrong, here.device, False)[0])


@proof("gradients off by {:.0f} of 4 and 2", te=True, devices=("cpu", "cuda"))
def two_modules_with_one_weight(here: Here) -> float:
    """Of two modules with one weight, backward_dw() keeps the gradient of one.

    To reproduce: two `te.Linear(..., delay_wgrad_compute=True)`, `second.weight = first.weight`, a backward pass
    through both, and `backward_dw()` of both. Compare with modules that delay nothing.

    Right would be the sum of both gradients. Seen in 2.3 to 2.20.2.
    """
    return float(here.run(wrong, here.device, True)[0])


def wrong_experts() -> float:
    """How far the gradients of two microbatches are from twice those of one that delays nothing, over their norm."""
    with kernels() as te:
        if not hasattr(te.Linear, "backward_dw"):
            raise LacksFeatureError("this Transformer Engine delays no gradients")
        layers = [layer_of(te, "GroupedLinear", **options) for options in ({}, {"delay_wgrad_compute": True})]
        forward_and_backward(layers[0])
        for _ in range(2):
            forward_and_backward(layers[1])
            layers[1].backward_dw()
    truth, found = ([(2 - number) * p.grad for p in layer.parameters()] for number, layer in enumerate(layers))
    off = sum(float((a - b).square().sum()) for a, b in zip(found, truth, strict=True))
    return (off / sum(float(gradient.square().sum()) for gradient in truth)) ** 0.5


@proof("gradients off by {:.1e}", bound=1e-6, te=True)
def two_microbatches_of_experts(here: Here) -> float:
    """The same with experts, from forward to backward_dw().

    To reproduce: `te.GroupedLinear(2, 32, 48, delay_wgrad_compute=True)`, and twice `layer(x, [3, 5]).sum().backward()`
    with `layer.backward_dw()` behind. Compare the gradients with twice those of a layer that delays nothing.

    From 2.8 on, backward itself also adds memory to the weights' gradients that nothing has written to. Seen in 2.3 to
    2.20.2. Here torch stands in for the kernels.
    """
    return float(here.run(wrong_experts)[0])
