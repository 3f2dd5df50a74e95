"""The rows of a rotary table for the tokens of a packed (THD) row, without a loop over sequences or host reads.

A row holds N sequences one after another. `cu_seqlens` [N + 1] are their cumulative lengths over all context-parallel
ranks, padding included. Under context parallelism a sequence of length L is cut into 2 * cp chunks. Rank r holds chunk
r, then chunk 2 * cp - 1 - r (zigzag), so its row has L / cp tokens of the sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shim.ops._checks import require

__all__ = ["thd_freqs"]


def thd_freqs(
    freqs: Tensor,
    cu_seqlens: Tensor,
    tokens: int,
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
    row_per_token: bool | None = True,
) -> Tensor:
    """The row of `freqs` for each of the T = `tokens` tokens of a packed row on this rank: [T, ...].

    freqs: [positions, ...], any dtype, with one row per position of a sequence. Differentiable in freqs (backward).
    row_per_token: True means that a table with as many rows as the whole packed row has tokens
    (``freqs.size(0) == cu_seqlens[-1]``) has one row per token instead. None means the same, but only if every sequence
    begins with the row that the first sequence begins with. A table of positions does not. Both are decided on the
    device.

    cu_seqlens: int32 or int64 [N + 1], N > 0, of the whole row. Each length is divided by cp_size, as attention cuts
    it. ValueError for another shape, and for lengths that are negative, do not add up to T, or do not split into two
    halves for a zigzag; on CUDA the latter three are device-side assertions. A table that is too short is an
    IndexError, on CUDA a device-side assertion. The number of kernels does not depend on N, and the host reads nothing
    back.
    """
    runs = thd_runs(freqs, cu_seqlens, tokens, cp_size=cp_size, cp_rank=cp_rank, row_per_token=row_per_token)
    return freqs.index_select(0, thd_rows(runs, tokens))


class Runs(NamedTuple):
    """Tokens of a packed row on this rank that take consecutive rows of a table: a run for each sequence.

    Under context parallelism there are two for each, one for each chunk. ends [R]: the place behind the last token of
    a run. zeros [R]: the place at which it would take the table's first row. That may lie before the packed row.
    """

    ends: Tensor
    zeros: Tensor


def thd_runs(
    freqs: Tensor, cu_seqlens: Tensor, tokens: int, *, cp_size: int, cp_rank: int, row_per_token: bool | None
) -> Runs:
    """The runs of the rows that `thd_freqs` takes, with the dtype of cu_seqlens, on the device of freqs."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens must have the shape [N + 1] with N > 0, not {list(cu_seqlens.shape)}")
    # A copy to the device does not wait; a copy from the device to the host would.
    cu = cu_seqlens.to(freqs.device, non_blocking=True)
    if cp_size == 1:
        cuts = cu - cu[0]
        zeros, ends = cuts[:-1], cuts[1:]
    else:
        lengths = torch.div(cu[1:] - cu[:-1], cp_size, rounding_mode="floor")
        ends = lengths.cumsum(0, dtype=cu.dtype)
        zeros = ends - lengths
    fits = (ends[-1] == tokens) & (zeros <= ends).all()
    if cp_size > 1:
        fits &= (lengths % 2 == 0).all()
    require(fits, f"cu_seqlens does not fit a row of {tokens} tokens on each of {cp_size} ranks")
    # The whole row has at least as many tokens, so a table with fewer rows has none for each.
    if row_per_token is not False and freqs.size(0) >= tokens * cp_size:
        # A product with the answer, because reading the answer would make the host wait.
        is_so = cu[-1] == freqs.size(0)
        if row_per_token is None:
            is_so &= _begin_alike(freqs, cu[:-1])
        zeros = zeros - cu[:-1] * is_so
    if cp_size == 1:
        return Runs(ends, zeros)
    half = lengths // 2
    head = cp_rank * half
    tail = (cp_size - 1) * lengths - head  # to chunk 2 * cp - 1 - rank
    return Runs(torch.stack([ends - half, ends], 1).flatten(), torch.stack([zeros - head, zeros - tail], 1).flatten())


def thd_rows(runs: Runs, tokens: int) -> Tensor:
    """The row of each token: [T], with the dtype and on the device of the runs."""
    here = torch.arange(tokens, device=runs.ends.device, dtype=runs.ends.dtype)
    # Empty runs end where they begin; right=True skips them.
    run = torch.bucketize(here, runs.ends, right=True, out_int32=True)
    here -= runs.zeros.index_select(0, run)
    return here


def _begin_alike(freqs: Tensor, starts: Tensor) -> Tensor:
    """Whether the rows of `freqs` at `starts` [N] all equal its first row. Starts after the end do not count."""
    last = freqs.size(0) - 1
    same = (freqs.detach().index_select(0, starts.clamp(max=last)) == freqs.detach()[:1]).flatten(1).all(1)
    return (same | (starts > last)).all()
