"""Upstream's grouped experts on a CPU, for proofs and tests: torch multiplies in the place of grouped kernels."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

__all__ = ["EXPERTS", "grouped", "sequential", "te_grouped"]

EXPERTS = "megatron.core.transformer.moe.experts"


class _Product(torch.autograd.Function):
    """The rows of each expert, [rows, n], by its matrix, [experts, n, m]. Keeps these two, as kernels do."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        ctx.counts = counts
        return torch.cat([part @ matrix for part, matrix in zip(rows.split(counts), matrices, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, matrices = ctx.saved_tensors
        parts = list(zip(rows.split(ctx.counts), grad.split(ctx.counts), matrices, strict=True))
        grad_rows = torch.cat([of_output @ matrix.t() for _, of_output, matrix in parts])
        return grad_rows, torch.stack([part.t() @ of_output for part, of_output, _ in parts]), None


class GroupedLinear(nn.Module):
    """In the place of Transformer Engine's linear layers of all experts."""

    def __init__(self, experts: int, inputs: int, outputs: int, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, inputs, outputs))

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        return _Product.apply(rows, self.weight, counts), None


@contextlib.contextmanager
def sequential() -> Iterator[dict[str, Any]]:
    """Inside, build_gpt builds experts one by one, as ever. Gives the config that they need."""
    yield {}


@contextlib.contextmanager
def te_grouped() -> Iterator[dict[str, Any]]:
    """Inside, build_gpt builds TEGroupedMLP."""
    parts = SimpleNamespace(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear, activation_func=None)
    with _built("TEGroupedMLP", submodules=parts):
        yield {}


@contextlib.contextmanager
def grouped() -> Iterator[dict[str, Any]]:
    """Inside, build_gpt builds GroupedMLP, which runs in models of bf16 only. Up to 0.16."""
    experts = import_module(EXPERTS)
    product = lambda rows, matrices, counts, trans_b: _Product.apply(rows, matrices, counts.tolist())  # noqa: E731
    kernels = SimpleNamespace(assert_grouped_gemm_is_available=lambda: None, ops=SimpleNamespace(gmm=product))
    with (
        mock.patch.object(experts, "gg", kernels),
        mock.patch.object(experts, "jit_fuser", lambda function: function),  # else a compiler runs
        _built("GroupedMLP"),
    ):
        yield {"bf16": True}  # of the config alone: weights and activations stay in fp32


@contextlib.contextmanager
def _built(name: str, **parts: Any) -> Iterator[None]:
    """Inside, the spec of a layer names these experts."""
    specs: Any = import_module("megatron.core.models.gpt.gpt_layer_specs")
    with mock.patch.object(
        specs, "get_gpt_layer_local_spec", _with_experts(specs.get_gpt_layer_local_spec, name, parts)
    ):
        yield


def _with_experts(original: Callable[..., Any], name: str, parts: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_gpt_layer_local_spec(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.transformer.spec_utils import ModuleSpec

        spec, kind = original(*args, **kwargs), getattr(import_module(EXPERTS), name)
        mlp = spec.submodules.mlp
        within = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
        takes_spec = isinstance(within.experts, ModuleSpec)
        within.experts = ModuleSpec(kind, **parts) if takes_spec else functools.partial(kind, **parts)
        return spec

    return get_gpt_layer_local_spec
