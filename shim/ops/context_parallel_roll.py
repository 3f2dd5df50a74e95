"""The packed roll of a row that is cut over context-parallel ranks: one exchange with each neighbour, differentiable.

Zigzag: a length L is cut into 2 * cp chunks, and rank r holds chunk r (its front) followed by chunk 2 * cp - 1 - r (its
tail). Partition ``"sequence"`` cuts every slot of the row so, as attention over packed rows needs it, ``"row"`` the row
as a whole. A token's successor lies on the same rank, except behind the last token of a chunk: behind a front it is the
first token of the next rank's front (behind the last rank's front: of its own tail), behind a tail the first token of
the previous rank's tail. So for all sequences together a rank sends the first tokens of its fronts to the previous rank
and those of its tails to the next one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shim.ops.packed_roll import lengths_on

__all__ = ["PARTITIONS", "RankRollIndex", "rank_roll_index", "roll_on_rank"]

PARTITIONS = ("sequence", "row")


class RankRollIndex(NamedTuple):
    """What a rank needs to roll its share of a row, t = T / cp tokens in n pieces (sequences, or the row as one).

    continues, in_sequence, valid: [t], as in shim.ops.packed_roll.RollIndex, for the tokens of this rank.
    source: int64 [t], where the next token of the row is found among (own t tokens, n received from the next rank, n
        received from the previous one).
    fronts, tails: int64 [n], the first tokens of this rank's chunks.
    """

    continues: Tensor
    in_sequence: Tensor
    valid: Tensor
    source: Tensor
    fronts: Tensor
    tails: Tensor


def _require(condition: Tensor, message: str) -> None:
    """Raise where `condition` (bool, 0-dimensional) is false: at once on CPU, by a device-side assertion on CUDA,
    because reading it back would make the host wait."""
    if condition.device.type == "cuda":
        torch._assert_async(condition, message)
    elif not bool(condition):
        raise ValueError(message)


def rank_roll_index(
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    length: int,
    device: torch.device | str,
    rank: int,
    ranks: int,
    partition: str = "sequence",
) -> RankRollIndex:
    """The index of rank `rank` of `ranks` for its share of `length` = T / ranks tokens.

    cu_seqlens, cu_seqlens_padded: integer [N + 1], global, as in shim.ops.packed_roll. No host read, and a number of
    kernels that does not depend on N. ValueError (on CUDA a device-side assertion) where a slot cannot be shared out
    evenly; ValueError for an unknown partition.
    """
    if partition not in PARTITIONS:
        raise ValueError(f"partition is {partition!r}; it must be one of {', '.join(PARTITIONS)}")
    device = torch.device(device)
    cu, slots = lengths_on(device, cu_seqlens, cu_seqlens_padded)
    here = torch.arange(length, device=device, dtype=cu.dtype)
    if partition == "row":
        starts = torch.tensor([0, length], device=device, dtype=cu.dtype)
        piece = torch.zeros_like(here)
    else:
        _require((slots % ranks == 0).all(), f"every slot of a packed row must be a multiple of the {ranks} ranks")
        starts = torch.div(slots, ranks, rounding_mode="floor")
        piece = torch.bucketize(here, starts[1:], right=True).clamp_(max=starts.numel() - 2)
    share = starts[1:] - starts[:-1]
    front = torch.div(share + 1, 2, rounding_mode="floor")  # an odd share has the longer front, as torch.chunk cuts it
    tail = share - front
    offset, f, t = here - starts[piece], front[piece], tail[piece]
    in_front = offset < f
    at = torch.where(in_front, rank * f + offset, ranks * f + (ranks - 1 - rank) * t + offset - f)  # in the piece
    if partition == "row":
        slot = torch.bucketize(at, slots[1:], right=True).clamp_(max=slots.numel() - 2)
        at = at - slots[slot]
    else:
        slot = piece
    # What lies behind the last slot is no token, on whichever rank.
    ends = torch.where(here < starts[-1], (cu[1:] - cu[:-1])[slot], 0)
    n = share.numel()
    behind_front = (starts[:-1] + front)[piece] if rank == ranks - 1 else length + piece
    source = torch.where(in_front & (offset + 1 == f), behind_front, here + 1)
    source = torch.where(~in_front & (offset + 1 == f + t), length + n + piece, source).clamp_(max=length + 2 * n - 1)
    last = max(length - 1, 0)
    fronts, tails = starts[:-1].clamp(max=last), (starts[:-1] + front).clamp(max=last)
    return RankRollIndex(at + 1 < ends, at, at < ends, source.long(), fronts.long(), tails.long())


def _swap(to_previous: Tensor, to_next: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Send one tensor to each neighbour and return (from the next rank, from the previous); zeros at the ends."""
    from_next, from_previous = torch.zeros_like(to_previous), torch.zeros_like(to_next)
    ranks = dist.get_process_group_ranks(group)
    me = dist.get_rank(group)
    messages = []
    if me > 0:
        messages.append(dist.P2POp(dist.isend, to_previous, ranks[me - 1], group))
        messages.append(dist.P2POp(dist.irecv, from_previous, ranks[me - 1], group))
    if me < len(ranks) - 1:
        messages.append(dist.P2POp(dist.irecv, from_next, ranks[me + 1], group))
        messages.append(dist.P2POp(dist.isend, to_next, ranks[me + 1], group))
    for request in dist.batch_isend_irecv(messages) if messages else ():
        request.wait()
    return from_next, from_previous


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, to_previous: Tensor, to_next: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        ctx.group = group
        return _swap(to_previous.contiguous(), to_next.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, from_next: Tensor, from_previous: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        # What came from a rank goes back to it: its next neighbour's gradient is that of what was sent to it.
        of_next, of_previous = _swap(from_previous.contiguous(), from_next.contiguous(), ctx.group)
        return of_previous, of_next, None


def roll_on_rank(tensor: Tensor, index: RankRollIndex, dim: int, group: Any) -> Tensor:
    """Shift this rank's share of a packed row left by one inside each sequence.

    tensor: any dtype and rank, ``tensor.size(dim)`` = t, the same on all ranks of `group`; differentiable, where all
    ranks run backward. At most one message to and one from each neighbour, whatever the number of sequences.
    """
    if tensor.size(dim) == 0:
        return tensor.clone()
    # Neither bool nor the eight-bit floats travel everywhere; as bytes they do.
    as_bytes = tensor.element_size() == 1 and tensor.dtype is not torch.uint8
    given = tensor.view(torch.uint8) if as_bytes else tensor
    received = _Exchange.apply(given.index_select(dim, index.fronts), given.index_select(dim, index.tails), group)
    shape = [1] * given.dim()
    shape[dim] = given.size(dim)
    rolled = torch.cat([given, *received], dim).index_select(dim, index.source)
    rolled = rolled.masked_fill_(~index.continues.view(shape), 0)
    return rolled.view(tensor.dtype) if as_bytes else rolled
