"""The rows of a rotary table for the tokens of a packed (THD) row, without a loop over sequences or host reads.

A row holds N sequences one after another. `cu_seqlens` [N + 1] are their cumulative lengths over all context-parallel
ranks, padding included. Under context parallelism a sequence of length L is cut into 2 * cp chunks. Rank r holds chunk
r, then chunk 2 * cp - 1 - r (zigzag), so its row has L / cp tokens of the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shim.ops._checks import require

__all__ = ["thd_freqs"]


def _placed(
    cu_seqlens: Tensor, tokens: int, device: torch.device | str, cp_size: int, cp_rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(position [T], sequence [T], start [N]) of the `tokens` = T tokens that rank `cp_rank` of `cp_size` holds.

    position: that of a token in its sequence, counted over all ranks. sequence: the number of that sequence. start:
    the start of each sequence in the whole row. position and start have the dtype of cu_seqlens.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens must have the shape [N + 1] with N > 0, not {list(cu_seqlens.shape)}")
    # A copy to the device does not wait; a copy from the device to the host would.
    cu = cu_seqlens.to(device, non_blocking=True)
    starts, lengths = cu[:-1], cu[1:] - cu[:-1]
    if cp_size > 1:
        lengths = torch.div(lengths, cp_size, rounding_mode="floor")
    ends = lengths.cumsum(0, dtype=cu.dtype)
    fits = (ends[-1] == tokens) & (lengths >= 0).all()
    if cp_size > 1:
        fits &= (lengths % 2 == 0).all()
    require(fits, f"cu_seqlens does not fit a row of {tokens} tokens on each of {cp_size} ranks")
    here = torch.arange(tokens, device=cu.device, dtype=cu.dtype)
    # Empty sequences end where they begin; right=True skips them.
    sequence = torch.bucketize(here, ends, right=True, out_int32=True).clamp_(max=lengths.numel() - 1)
    position = here - (ends - lengths).index_select(0, sequence)
    if cp_size > 1:
        own = lengths.index_select(0, sequence)
        half = own // 2
        # The tail is chunk 2 * cp - 1 - rank.
        tail = (cp_size - 1) * own - cp_rank * half
        position += torch.where(position < half, cp_rank * half, tail)
    return position, sequence, starts


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
    rows = thd_rows(freqs, cu_seqlens, tokens, cp_size=cp_size, cp_rank=cp_rank, row_per_token=row_per_token)
    return freqs.index_select(0, rows)


def thd_rows(
    freqs: Tensor, cu_seqlens: Tensor, tokens: int, *, cp_size: int, cp_rank: int, row_per_token: bool | None
) -> Tensor:
    """Which rows of `freqs` `thd_freqs` takes: [T], with the dtype of cu_seqlens, on the device of freqs."""
    rows, sequence, starts = _placed(cu_seqlens, tokens, freqs.device, cp_size, cp_rank)
    if row_per_token is not False:
        # A product with the answer, because reading the answer would make the host wait.
        is_so = cu_seqlens[-1].to(freqs.device, non_blocking=True) == freqs.size(0)
        if row_per_token is None:
            is_so &= _begin_alike(freqs, starts)
        rows += (starts * is_so).index_select(0, sequence)
    return rows


def _begin_alike(freqs: Tensor, starts: Tensor) -> Tensor:
    """Whether the rows of `freqs` at `starts` [N] all equal its first row. Starts after the end do not count."""
    last = freqs.size(0) - 1
    same = (freqs.detach().index_select(0, starts.clamp(max=last)) == freqs.detach()[:1]).flatten(1).all(1)
    return (same | (starts > last)).all()
