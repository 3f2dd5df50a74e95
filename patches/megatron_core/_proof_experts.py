"""Steps of models with experts, on a CPU: what proofs share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim import testing


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """No part of a router is compiled, which takes many seconds.

    Nor is Transformer Engine looked for: 0.16 looks a name up in every step, and has it with that only.
    """
    from megatron.core.transformer.moe import moe_utils

    with mock.patch.object(moe_utils, "te_general_gemm", None, create=True), torch.compiler.set_stance("force_eager"):
        yield


def step(tokens: int, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses of a row of so many tokens, [1, tokens], and gradients of their mean by the names of the parameters."""
    with eager():
        model: Any = testing.build_gpt(**options)
        row = torch.arange(tokens)[None]
        losses: Tensor = model(row, row, None, labels=row)
        losses.mean().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return losses.detach(), gradients
