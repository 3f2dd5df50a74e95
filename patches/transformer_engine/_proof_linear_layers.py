"""Linear layers of Transformer Engine whose products and norms torch computes, for proofs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim import testing
from shim.testing.fp8_layer import fresh_fp8_state
from shim.testing.transformer_engine import compiled_ops

INPUTS, OUTPUTS, EXPERTS = 32, 48, 2
ROWS = (3, 5)  # of each expert; other layers get all of them
EPS = 1e-5


def rows_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1])


def generic_gemm(*args: Any, **kwargs: Any) -> Any:
    """cuBLAS's product of two matrices, which adds a bias, or gives the gradient of one; it may add to its output."""
    left, transpose_left, right, transpose_right, output = args[:5]
    bias, is_gradient, accumulates = args[7], args[11], args[14]
    a, b = rows_of(left), rows_of(right)
    product = (b.t() if transpose_right else b) @ (a.t() if transpose_left else a)
    if not transpose_right:
        product = product.view(*right.shape[:-1], product.shape[-1])
    if bias is not None and not is_gradient:
        product = product + bias.detach()
    if output is not None:
        product = output.add_(product) if accumulates else output.copy_(product)
    return product, b.sum(0) if bias is not None and is_gradient else None, None, None


def te_general_grouped_gemm(*args: Any) -> Any:
    """As many products as groups; their biases, or the gradients of those, come back."""
    left, transpose_left, right, transpose_right, outputs, _, splits, biases, _, single, _, is_gradient = args[:12]
    outputs = outputs[0].split(splits) if single else outputs
    for a, b, output, bias in zip(left, right, outputs, biases):
        of_group = [None] * 7 + [bias if bias.numel() else None, None, None, None, is_gradient, None, None, args[14]]
        of_group[:5] = [a, transpose_left, b, transpose_right, output]
        _, of_bias, *_ = generic_gemm(*of_group)
        if of_bias is not None:
            bias.copy_(of_bias)
    return biases


def layernorm_fwd(rows: Tensor, weight: Tensor, bias: Tensor, *more: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = rows_of(rows)
    mean, scale = rows.mean(-1), (rows.var(-1, unbiased=False) + EPS).rsqrt()
    return (rows - mean[:, None]) * scale[:, None] * weight.detach() + bias.detach(), mean, scale


def layernorm_bwd(of_output: Tensor, rows: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, *more: Any) -> Any:
    of_output, rows = rows_of(of_output), rows_of(rows)
    normed = (rows - mean[:, None]) * scale[:, None]
    of_normed = of_output * weight.detach()
    centred = of_normed - of_normed.mean(-1, keepdim=True) - normed * (of_normed * normed).mean(-1, keepdim=True)
    return centred * scale[:, None], (of_output * normed).sum(0), of_output.sum(0)


def relu(rows: Tensor, *more: Any) -> Tensor:
    return rows.detach().relu()


def drelu(of_output: Tensor, rows: Tensor, *more: Any) -> Tensor:
    return rows_of(of_output) * (rows_of(rows) > 0)


KERNELS: dict[str, Callable[..., Any]] = {
    "relu": relu,
    "drelu": drelu,
    "generic_gemm": generic_gemm,
    "te_general_grouped_gemm": te_general_grouped_gemm,
    "layernorm_fwd": layernorm_fwd,
    "layernorm_bwd": layernorm_bwd,
}


def on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, device=None, **options: make(*args, **options)


@contextlib.contextmanager
def kernels() -> Iterator[Any]:
    """transformer_engine.pytorch, whose linear layers compute here by torch."""
    with (
        testing.te_cuda_stand_ins(),
        compiled_ops(KERNELS),
        fresh_fp8_state(),
        mock.patch.dict(os.environ, NVTE_TORCH_COMPILE="0"),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "get_rng_state", lambda *args: torch.zeros(1)),
        mock.patch.object(torch.cuda, "device", lambda *args: contextlib.nullcontext()),
        mock.patch.object(Tensor, "cuda", lambda tensor, *args, **kwargs: tensor),
        mock.patch.object(Tensor, "is_cuda", True, create=True),
        mock.patch.object(
            import_module("transformer_engine_torch"), "_num_cublas_streams", 1, create=True
        ),  # up to 2.4
        # Backward asks for a device by its name.
        mock.patch.multiple(torch, empty=on_cpu(torch.empty), empty_like=on_cpu(torch.empty_like)),
    ):
        yield import_module("transformer_engine.pytorch")


def layer_of(te: Any, kind: str, **options: Any) -> Any:
    """A layer in fp32, INPUTS to OUTPUTS, whose weights and biases are random."""
    groups = (EXPERTS,) if kind == "GroupedLinear" else ()
    options = {"params_dtype": torch.float32, "device": "cpu", **options}
    with_activation = {"activation": "relu"} if kind == "LayerNormMLP" else {}
    layer = getattr(te, kind)(*groups, INPUTS, OUTPUTS, bias=True, **with_activation, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


def forward_and_backward(layer: Any) -> Tensor:
    """One step on random rows and a random gradient of the output. Returns the rows, [sum of ROWS, INPUTS]."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(sum(ROWS), INPUTS, generator=generator).requires_grad_()
    splits = (list(ROWS),) if hasattr(layer, "num_gemms") else ()
    output = layer(rows, *splits)
    output.backward(torch.randn(output.shape, generator=generator))
    return rows
