"""Proofs of te-cp-thd-padding.

The kernels need a GPU. Here functions in torch stand for cuDNN's fused attention of packed rows and for the compiled
helpers that cut a rank's part and put partial results together. All between them is Transformer Engine's own Python:
DotProductAttention, the choice of the backend, and the ring of ranks with its offsets for each step.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim.patches.transformer_engine._proof_attention import CUDNN, PACKAGE, OnGpu
from shim.testing.layout import Layout
from shim.testing.proof import CannotRunError, Here, proof

RANKS, HEADS, HEAD = 2, 2, 8
NOTHING = -1e30  # the logarithm of the sum over no key; finite, so that differences stay numbers


def places(starts: Tensor, lengths: Tensor) -> Iterator[tuple[slice, slice]]:
    """All rows and the real ones of each sequence of a part, from offsets with padding and offsets without."""
    ends, real = starts[1:].tolist(), lengths.diff().tolist()
    for start, end, length in zip(starts[:-1].tolist(), ends, real, strict=True):
        yield slice(start, end), slice(start, start + length)


def fused_attention(
    training: bool, max_q: int, max_kv: int, lengths: Tensor, kv_lengths: Tensor, q: Tensor, k: Tensor, v: Tensor,
    *args: Any, attn_scale: float, attn_mask_type: str, cu_seqlens_q_padded: Tensor, cu_seqlens_kv_padded: Tensor,
    **others: Any,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """cuDNN's attention of packed rows q, k and v, [t, h, d]: the output, and in fp32 logarithms of sums, [t, h, 1]."""
    output, sums = torch.zeros_like(q), torch.full((*q.shape[:2], 1), NOTHING)
    q, k, v = q.float(), k.float(), v.float()
    of_kv = places(cu_seqlens_kv_padded, kv_lengths)
    for (_, rows), (_, columns) in zip(places(cu_seqlens_q_padded, lengths), of_kv, strict=True):
        if rows.start == rows.stop or columns.start == columns.stop:
            continue
        scores = torch.einsum("qhd,khd->hqk", q[rows], k[columns]) * attn_scale
        if "causal" in attn_mask_type:
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), NOTHING)
        output[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[columns]).to(output.dtype)
        sums[rows] = scores.logsumexp(-1, keepdim=True).transpose(0, 1)
    return output, [sums, torch.empty(0)]


def half(offsets: Tensor, second: int) -> Tensor:
    """The rows of the first (0) or the second (1) half of each sequence."""
    ends = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    halves = [((start + end) // 2, (end - start) // 2) for start, end in ends]
    return torch.cat([torch.arange(length) + (middle if second else middle - length) for middle, length in halves])


def read_half(rows: Tensor, offsets: Tensor, second: int) -> Tensor:
    return rows.index_select(rows.dim() - 3, half(offsets, second))


def correct_second_half(sums: Tensor, step: Tensor, offsets: Tensor, packed: bool) -> None:
    rows = half(offsets, 1)
    sums[:, rows] = torch.logaddexp(sums[:, rows], step.to(sums.dtype))


def correct_output(output: Tensor, step: Tensor, *rest: Any) -> None:
    """Add a step's part of the output. From 2.20 what is there already has its share of the sums before the step."""
    *before, sums, step_sums, offsets, second, _packed = rest
    rows = half(offsets, 1) if second else torch.arange(len(output))
    found = output.view(-1, HEADS, HEAD)
    if before:
        found[rows] *= (before[0] - sums)[:, rows].exp().T.unsqueeze(-1).to(output.dtype)
    share = (step_sums - sums[:, rows]).exp().T.unsqueeze(-1)
    found[rows] += (step.view(-1, HEADS, HEAD) * share).to(output.dtype)


@contextlib.contextmanager
def stand_ins() -> Iterator[Any]:
    """Transformer Engine's class of attention, whose kernels are the functions above."""
    owner = ring = utils = import_module("transformer_engine.pytorch.attention")
    if hasattr(owner, "__path__"):  # from 2.3
        names = ("dot_product_attention", "context_parallel", "utils")
        owner, ring, utils = (import_module(f"{PACKAGE}.{name}") for name in names)
    kernels: Any = import_module("transformer_engine_torch")
    backend = kernels.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    answer = (backend, "") if hasattr(utils, "FusedAttentionParams") else backend  # from 2.20
    attention: Any = owner.DotProductAttention
    if "pad_between_seqs" not in inspect.signature(attention.forward).parameters:
        raise CannotRunError("this release is as wrong, but takes no pad_between_seqs, so that nothing fixes it")
    substitutes = {
        "thd_read_half_tensor": read_half,
        "thd_second_half_lse_correction": correct_second_half,
        "thd_out_correction": correct_output,
        "get_fused_attn_backend": lambda *args, **kwargs: answer,
    }
    with contextlib.ExitStack() as undo:
        for name, substitute in substitutes.items():
            undo.enter_context(mock.patch.object(kernels, name, substitute))
        for name, module in list(sys.modules.items()):
            if name.startswith("transformer_engine.pytorch") and "get_cudnn_version" in vars(module):
                undo.enter_context(mock.patch.object(module, "get_cudnn_version", lambda: CUDNN))
        undo.enter_context(mock.patch.object(ring, "fused_attn_fwd", fused_attention))
        undo.enter_context(mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()))
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.enter_context(OnGpu())
        yield attention


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def own_rows(padded: list[int], rank: int) -> Tensor:
    """Which rows of the whole the rank has: of 2 RANKS chunks of each sequence, the rank-th from both ends."""
    starts = offsets_of(padded).tolist()
    chunks = [
        torch.arange(start, start + length).view(2 * RANKS, -1) for start, length in zip(starts, padded, strict=False)
    ]
    return torch.cat([torch.cat([chunk[rank], chunk[-1 - rank]]) for chunk in chunks])


def sample(padded: list[int]) -> list[Tensor]:
    """Queries, keys and values of a whole packed row, [t, h, d] in bf16, which fused attention takes."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(sum(padded), HEADS, HEAD, generator=generator).bfloat16() for _ in range(3)]


def attended(padded: list[int], real: list[int], **arguments: Any) -> tuple[Tensor, Tensor]:
    """The rank's output for its real tokens, [n, h * d], and what each sequence gives alone, in fp64."""
    group = torch.distributed.group.WORLD
    rank = torch.distributed.get_rank()
    whole = sample(padded)
    lengths, starts = offsets_of(real), offsets_of(padded)
    truth = torch.zeros(sum(padded), HEADS * HEAD, dtype=torch.float64)
    for _, rows in places(starts, lengths):
        q, k, v = (part[rows].double().transpose(0, 1) for part in whole)
        alone = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        truth[rows] = alone.transpose(0, 1).flatten(1)
    own = own_rows(padded, rank)
    real_rows = torch.cat([torch.arange(rows.start, rows.stop) for _, rows in places(starts, lengths)])
    with stand_ins() as attention, torch.no_grad():
        with mock.patch.object(torch.cuda, "is_available", lambda: True):
            layer = attention(
                HEADS, HEAD, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal", cp_group=group,
                cp_global_ranks=list(range(RANKS)), cp_stream=torch.cuda.Stream(),
            )  # fmt: skip
        offsets = {f"cu_seqlens_{part}": lengths for part in ("q", "kv")}
        offsets |= {f"cu_seqlens_{part}_padded": starts.clone() for part in ("q", "kv")}
        largest = {"max_seqlen_q": max(padded), "max_seqlen_kv": max(padded)}
        found = layer(*(part[own] for part in whole), **offsets, **largest, **arguments)
    there = torch.isin(own, real_rows)
    return found[there].double(), truth[own[there]]


def error_of(padded: list[int], real: list[int]) -> float:
    found, truth = attended(padded, real)
    return float((found - truth).norm() / truth.norm())


@proof("attention off by {:.1e}", bound=1e-2, ranks=RANKS, te=True)
def padding_behind_the_last_sequence(here: Here) -> float:
    """Transformer Engine's attention of a packed row loses tokens under context parallelism if the last is padded.

    To reproduce: `DotProductAttention(..., qkv_format="thd", attn_mask_type="padding_causal")` on two context-parallel
    ranks with cp_comm_type="p2p". Give it sequences of 8 and 13 tokens, the second padded to 16: cu_seqlens
    [0, 8, 21] and cu_seqlens_padded [0, 8, 24]. Compare with each sequence alone. Here functions in torch stand for
    the kernels of cuDNN, which need a GPU.

    `DotProductAttention.forward` compares `cu_seqlens_q_padded[:-1]` with `cu_seqlens_q[:-1]`, which are equal, so
    pad_between_seqs is False. Each rank then takes `cu_seqlens // cp_size`: 6 tokens of the last sequence, where rank 0
    has 5 and rank 1 has 8. Right is the comparison of all entries. Wrong in 2.1 to 2.17; from 2.18 (pull request 2898)
    padded offsets count as padding.
    """
    return max(here.run(error_of, [8, 16], [8, 13], layout=Layout(cp=RANKS)))
