"""MambaMixer on a CPU: what proofs share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from shim.testing.proof import CannotRunError


class _GatedNorm(nn.Module):
    """The norm of the package mamba_ssm, whose kernel needs a GPU: each group of channels has its own."""

    def __init__(self, hidden_size: int, eps: float, group_size: int, dtype: Any = None, **ignored: Any) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, states: Tensor) -> Tensor:
        groups = states.unflatten(-1, (-1, self.group_size))
        return functional.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


def _scanned(states: Tensor, *weights: Tensor, D: Tensor, headdim: int, **options: Any) -> Tensor:
    """In the place of the scan, whose kernel needs a GPU: the channels that gate it, [b, s, channels]."""
    return torch.tanh(states[..., : len(D) * headdim])


@contextmanager
def mamba_on_cpu() -> Iterator[None]:
    """Import megatron-core's mamba_mixer anew, beside a mamba_ssm that runs on a CPU."""
    name = "megatron.core.ssm.mamba_mixer"
    if find_spec("einops") is None:
        raise CannotRunError("einops is not installed, which MambaMixer needs")
    package: Any = import_module("megatron.core.ssm")
    triton = "mamba_ssm.ops.triton"
    stand_ins = {path: ModuleType(path) for path in ("mamba_ssm", "mamba_ssm.ops", triton)}
    stand_ins |= {f"{triton}.{path}": ModuleType(path) for path in ("layernorm_gated", "ssd_combined")}
    vars(stand_ins[f"{triton}.layernorm_gated"]).update(RMSNorm=_GatedNorm)
    scans = dict.fromkeys(("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"), _scanned)
    vars(stand_ins[f"{triton}.ssd_combined"]).update(scans)
    with mock.patch.dict(sys.modules, stand_ins), mock.patch.object(package, "mamba_mixer", None, create=True):
        sys.modules.pop(name, None)
        import_module(name)
        yield
