"""The rows of a rotary table that the tokens of a packed (THD) row take, without a loop over sequences or host reads.

A row holds N sequences one after another; `cu_seqlens` [N + 1] are their cumulative lengths, padding included, over all
context-parallel ranks. Under context parallelism a sequence of length L is cut into 2 * cp chunks, and rank r holds
chunk r followed by chunk 2 * cp - 1 - r (zigzag), so that rank's row has L / cp tokens of it.
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

    position: of a token in its own sequence, counted over all ranks. sequence: the number of that sequence. start:
    where each sequence starts in the whole row. All but the second in the dtype of cu_seqlens.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens must have the shape [N + 1] with N > 0, not {list(cu_seqlens.shape)}")
    # A copy to the tensor's device does not wait; one from the device to the host would.
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
    # Sequences of no length end where they begin: right=True steps over them.
    sequence = torch.bucketize(here, ends, right=True, out_int32=True).clamp_(max=lengths.numel() - 1)
    position = here - (ends - lengths).index_select(0, sequence)
    if cp_size > 1:
        own = lengths.index_select(0, sequence)
        half = own // 2
        # The tail lies behind the chunks of all ranks before it, counted from the end.
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
    """The row of `freqs` for each of the T = `tokens` tokens that this rank holds of a packed row: [T, ...].

    freqs: [positions, ...], any dtype, one row per position of a sequence. With `row_per_token`, a table of as many
    rows as the whole row has tokens (``freqs.size(0) == cu_seqlens[-1]``) has one row per token instead; with None,
    only where every sequence begins with the row that the first one begins with, as a table of positions does not.
    Both are decided on the device. Differentiable with regard to freqs (backward).

    cu_seqlens: int32 or int64 [N + 1], N > 0, of the whole row. Each length is divided by cp_size, as attention cuts
    it. ValueError for another shape, and where the lengths are negative, do not add up to T, or cannot be cut in two
    halves for a zigzag; on CUDA the latter three are device-side assertions. A table that is too short is an
    IndexError, on CUDA a device-side assertion. The number of kernels does not depend on N, and nothing is read back.
    """
    rows, sequence, starts = _placed(cu_seqlens, tokens, freqs.device, cp_size, cp_rank)
    if row_per_token is not False:
        # Multiplied by the answer, because reading it would make the host wait.
        is_so = cu_seqlens[-1].to(freqs.device, non_blocking=True) == freqs.size(0)
        if row_per_token is None:
            is_so &= _begin_alike(freqs, starts)
        rows += (starts * is_so).index_select(0, sequence)
    return freqs.index_select(0, rows)


def _begin_alike(freqs: Tensor, starts: Tensor) -> Tensor:
    """Whether the rows of `freqs` at `starts` [N] are all the first one; those behind the end do not count."""
    last = freqs.size(0) - 1
    same = (freqs.detach().index_select(0, starts.clamp(max=last)) == freqs.detach()[:1]).flatten(1).all(1)
    return (same | (starts > last)).all()
