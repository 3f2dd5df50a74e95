"""Proof of te-requires-grad. The tensor, its class and autograd are real; nothing is computed with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.patches.transformer_engine._proof_mxfp8 import weight
from shim.testing.proof import CannotRunError, Here, proof


class Quantize(torch.autograd.Function):
    """[r, c] in high precision to MXFP8, as a weight is cast in the forward pass. The gradient passes through."""

    @staticmethod
    def forward(ctx: Any, source: Tensor) -> Tensor:
        return weight(*source.shape, device="cpu")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override, unused-ignore]
        return gradient


class Scale(torch.autograd.Function):
    """Times two; asks its input whether to compute a gradient, as modules of Transformer Engine do."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, wanted: bool) -> Tensor:
        ctx.wanted = wanted
        ctx.save_for_backward(torch.full((1,), 2.0))
        return torch.ones(source.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override, unused-ignore]
        (factor,) = ctx.saved_tensors
        return gradient * factor if ctx.wanted else None, None


def quantized(requires_grad: bool = True) -> Any:
    """A source, and what Quantize makes of it."""
    source = torch.ones(128, 256, requires_grad=requires_grad)
    return source, Quantize.apply(source)


def with_tensors(function: Callable[[], Any]) -> Any:
    with testing.te_cuda_stand_ins():
        try:
            weight(device="cpu")
        except (AttributeError, ImportError, TypeError) as error:
            raise CannotRunError(f"this release has no such tensor: {error}") from error
        return function()


def lost() -> int:
    source, tensor = quantized()
    Scale.apply(tensor, tensor.requires_grad).sum().backward()
    return 0 if source.grad is not None and source.grad.all() else 1


@proof("{:.0f} of 1 gradient is lost", right="it has its gradient", te=True)
def a_quantized_tensor_gets_its_gradient(here: Here) -> int:
    """A quantized tensor that an autograd function returns says that it requires no gradient.

    To reproduce: return an `MXFP8Tensor` from the forward of a `torch.autograd.Function` whose input requires a
    gradient. `requires_grad` of the result is False, and its `grad_fn` is there. A function that asks it whether to
    compute a gradient, as Transformer Engine's modules do, loses it. Right is True.

    `QuantizedTensor.requires_grad` is a property that remembers what the tensor was made with, before autograd made it
    an output. Fixed in 2.18 (pull request 3172).
    """
    return int(here.run(with_tensors, lost)[0])
