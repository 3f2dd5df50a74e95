"""MambaMixer on a CPU: what proofs share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from shim.testing.proof import CannotRunError

STACK, LAYERS = "megatron.core.ssm.mamba_block", "megatron.core.extensions.transformer_engine"


def module_of_stack() -> Any:
    """The module of the hybrid stack. 0.12 imports a norm of Transformer Engine in it, which no proof uses."""
    with suppress(ImportError):
        return import_module(STACK)
    norms: Any = ModuleType(LAYERS)
    norms.TENorm = object
    with mock.patch.dict(sys.modules, {LAYERS: norms}):
        module = import_module(STACK)
    sys.modules[STACK] = module
    return module


class _GatedNorm(nn.Module):
    """The norm of the package mamba_ssm, whose kernel needs a GPU: each group of channels has its own."""

    def __init__(self, hidden_size: int, eps: float, group_size: int, dtype: Any = None, **ignored: Any) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, states: Tensor, gates: Tensor | None = None) -> Tensor:
        states = states if gates is None else states * functional.silu(gates)
        groups = states.unflatten(-1, (-1, self.group_size))
        return functional.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


def _same(sequences: Tensor | None, tokens: int) -> Tensor:
    """[b or 1, t, s]: whether token s stands in the sequence of token t, and not behind it."""
    place = torch.arange(tokens)
    seen = (place[:, None] >= place)[None]
    return seen if sequences is None else seen & (sequences[:, :, None] == sequences[:, None])


def _convolved(channels: Tensor, weight: Tensor, bias: Tensor, sequences: Tensor | None) -> Tensor:
    """The causal convolution of each channel within its sequence, and its SiLU. channels: [b, t, c], weight: [c, w]."""
    same, width = _same(sequences, channels.shape[1]), weight.shape[1]
    found = bias.expand_as(channels)
    for age in range(min(width, channels.shape[1])):
        earlier = functional.pad(channels, (0, 0, age, 0))[:, : channels.shape[1]]
        kept = functional.pad(same.diagonal(-age, -2, -1), (age, 0))  # whether the token `age` before is the sequence's
        found = found + weight[:, width - 1 - age] * earlier * kept[..., None]
    return functional.silu(found)


def _scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    D: Tensor,
    dt_bias: Tensor,
    z: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **ignored: Any,
) -> Tensor:
    """The state-space model of Mamba 2 as the masked attention that it is (Dao and Gu, 2024).

    x, z: [b, t, heads, d]. dt: [b, t, heads]. A, D, dt_bias: [heads]. B, C: [b, t, groups, n]. seq_idx: [b, t].
    """
    dt = functional.softplus(dt + dt_bias)
    age = (dt * A).cumsum(1).transpose(1, 2)  # [b, heads, t]
    same = _same(seq_idx, x.shape[1])[:, None]
    decay = (age[..., None] - age[:, :, None]).masked_fill(~same, -torch.inf).exp()
    B, C = (part.repeat_interleave(x.shape[2] // part.shape[2], 2) for part in (B, C))
    kept = decay * torch.einsum("bthn,bshn->bhts", C, B)
    found = torch.einsum("bhts,bsh,bshd->bthd", kept, dt, x) + D[:, None] * x
    return found if z is None else found * functional.silu(z)


def _convolved_scan(
    zxbcdt: Tensor,
    weight: Tensor,
    bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    *,
    headdim: int,
    ngroups: int,
    seq_idx: Tensor | None = None,
    **ignored: Any,
) -> Tensor:
    """Gates, channels, B, C and dt of each token, [b, t, all], to gated channels [b, t, heads * headdim]."""
    inner = len(A) * headdim
    z, mixed, dt = zxbcdt.split([inner, zxbcdt.shape[-1] - inner - len(A), len(A)], -1)
    mixed = _convolved(mixed, weight, bias, seq_idx)
    states = (mixed.shape[-1] - inner) // 2
    x, B, C = mixed.split([inner, states, states], -1)
    x, z = (part.unflatten(-1, (len(A), headdim)) for part in (x, z))
    B, C = (part.unflatten(-1, (ngroups, -1)) for part in (B, C))
    return _scan(x, dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias, z=z, seq_idx=seq_idx).flatten(-2)


def own_tokens(offsets: Tensor, total: int, ranks: int, rank: int) -> Tensor:
    """Of a context-parallel rank: its two chunks of each sequence. In the place of thd_get_partitioned_indices."""
    found = []
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        chunks = torch.arange(start, end).chunk(2 * ranks)
        found += [chunks[rank], chunks[-1 - rank]] if end > start else []
    return torch.cat(found)


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
    scans = {"mamba_chunk_scan_combined": _scan, "mamba_split_conv1d_scan_combined": _convolved_scan}
    vars(stand_ins[f"{triton}.ssd_combined"]).update(scans)
    with mock.patch.dict(sys.modules, stand_ins), mock.patch.object(package, "mamba_mixer", None, create=True):
        sys.modules.pop(name, None)
        mixer: Any = import_module(name)
        for needed in ("is_mamba_min_version", "is_causal_conv1d_min_version"):
            if hasattr(mixer, needed):  # for packed rows
                setattr(mixer, needed, lambda *versions, **options: True)
        parallel: Any = sys.modules.get("megatron.core.ssm.mamba_context_parallel")
        with ExitStack() as stack:
            if parallel:  # what context parallelism of packed rows asks of Transformer Engine
                for asked, stand_in in {
                    "tex": SimpleNamespace(thd_get_partitioned_indices=own_tokens),
                    "is_te_min_version": lambda *versions, **options: True,
                }.items():
                    stack.enter_context(mock.patch.object(parallel, asked, stand_in, create=True))
            yield


def mixer_spec() -> Any:
    """The spec of MambaMixer with local layers, inside `mamba_on_cpu`."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    module: Any = sys.modules["megatron.core.ssm.mamba_mixer"]
    return ModuleSpec(
        module.MambaMixer, submodules=module.MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
    )
