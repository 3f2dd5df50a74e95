"""A quantized linear layer on any device: that of Transformer Engine on a GPU, and with torch's GEMM on a CPU.

On a CPU the layer is a TransformerEngineBaseModule: Transformer Engine's code decides when it quantizes, by which
scale, when it keeps scales for a recompute and when it takes them again. Its computation replaces the kernels: it
rounds input and weight to E4M3 by these scales, and writes down their amax.

    with fresh_fp8_state():
        layer, recipe = fp8_linear(64), delayed_scaling(history=4)
        with fp8_region(recipe):
            output = layer(values)
        output.sum().backward()
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from .fp8 import state_manager

__all__ = ["OnGpu", "delayed_scaling", "fp8_linear", "fp8_region", "forget_fp8_state", "fresh_fp8_state"]

LARGEST = 448.0  # of E4M3


def fp8_linear(width: int, device: str = "cpu", seed: int = 0) -> nn.Module:
    """A linear layer [n, width] -> [n, width] without bias, quantized inside an FP8 region of Transformer Engine.

    Its weights depend on `seed` alone. They are fp32 on a CPU, which needs the context `te_cuda_stand_ins`. On a
    GPU they are bf16, and width and n must be multiples of 16.
    """
    weight = torch.randn(width, width, generator=torch.Generator().manual_seed(seed)) / width**0.5
    if device == "cpu":
        layer = _linear_on_cpu()(weight)
    else:
        from transformer_engine import pytorch as te

        layer = te.Linear(width, width, bias=False, params_dtype=torch.bfloat16, device=device)
        with torch.no_grad():
            layer.weight.copy_(weight)
    return layer


def delayed_scaling(history: int = 4, device: str = "cpu") -> Any:
    """Transformer Engine's DelayedScaling by the largest amax of so many regions. On a CPU torch computes the scales,
    by the same formula, because the kernel for it is compiled."""
    from transformer_engine.common.recipe import DelayedScaling

    if device != "cpu":
        return DelayedScaling(amax_history_len=history, amax_compute_algo="max")
    return DelayedScaling(amax_history_len=history, amax_compute_algo=_largest, scaling_factor_compute_algo=_scale)


def _largest(history: Tensor) -> Tensor:
    return history.max(dim=0).values


def _scale(amax: Tensor, scale: Tensor, fp8_max: float, recipe: Any) -> Tensor:
    return torch.where(amax > 0, fp8_max / amax, scale)


def fp8_region(recipe: Any) -> AbstractContextManager[Any]:
    """Transformer Engine's autocast with this recipe, by the name that the release has for it."""
    from transformer_engine import pytorch as te

    if hasattr(te, "autocast"):  # from 2.9
        return te.autocast(enabled=True, recipe=recipe)
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe)


@contextlib.contextmanager
def fresh_fp8_state() -> Iterator[None]:
    """Inside, Transformer Engine knows of no earlier module, scale or recompute. At the end it forgets those inside."""
    forget_fp8_state()
    try:
        yield
    finally:
        forget_fp8_state()


def forget_fp8_state() -> None:
    """Let Transformer Engine know of no earlier module, scale, recompute or group of ranks."""
    from transformer_engine.pytorch.distributed import activation_recompute_forward

    state_manager().reset()
    activation_recompute_forward._is_first_fp8_module.clear()


class OnGpu(Tensor):
    """An input that passes the checks of Transformer Engine's modules."""

    is_cuda = True


class _Rounded(torch.autograd.Function):
    """Values by a scale to E4M3 and back. Larger values become the largest one. The gradient passes through."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: Tensor) -> Tensor:
        return (values * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(values.dtype) / scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


@functools.cache
def _linear_on_cpu() -> Any:
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    # The base class is known only here, because this package imports no Transformer Engine.
    class Linear(TransformerEngineBaseModule):  # type: ignore[misc]
        def __init__(self, weight: Tensor) -> None:
            with mock.patch("torch.cuda.is_available", lambda: True):
                super().__init__()
            self.weight = nn.Parameter(weight)

        def _get_weight_tensors(self) -> list[Any]:
            return [self.weight]

        def _get_weight_quantizers(self) -> list[Any]:
            return [None]

        def _get_quantizers(self, *args: Any) -> tuple[Any, ...]:
            return ()

        def forward(self, values: Tensor) -> Tensor:
            prepared: Any = getattr(self, "prepare_forward_ctx", self.prepare_forward)
            with prepared(values.as_subclass(OnGpu), num_gemms=1) as given:
                given = given.as_subclass(Tensor)
                if not self.fp8:
                    return nn.functional.linear(given, self.weight)
                state = self.fp8_meta["scaling_fwd"]
                rounded = []
                for place, value in enumerate((given, self.weight)):
                    amax = state.amax_history[0, place]
                    amax.copy_(torch.maximum(amax, value.detach().abs().max()))
                    rounded.append(_Rounded.apply(value, state.scale[place].clone()))
                return nn.functional.linear(*rounded)

    return Linear
