"""The packed roll of a row that is split over context-parallel ranks: one differentiable exchange with each neighbour.

Zigzag: a length L is cut into 2 * cp chunks. Rank r holds chunk r (its front), then chunk 2 * cp - 1 - r (its tail).
Partition ``"sequence"`` cuts every slot of the row this way, as attention over packed rows needs it. Partition
``"row"`` cuts the row as a whole.

A token's successor is on the same rank, except for the last token of a chunk. After a front comes the first token of
the next rank's front; after the last rank's front comes that rank's tail. After a tail comes the first token of the
previous rank's tail. So a rank sends the first tokens of all its fronts to the previous rank, and the first tokens of
all its tails to the next rank, for all sequences together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shim.ops._checks import require
from shim.ops.roll import Mask, RollIndex, are_few, gaps, lengths_on, mask_of_runs, roll_with, slot_of

__all__ = ["PARTITIONS", "RankRollIndex", "rank_roll_index", "roll_on_rank"]

PARTITIONS = ("sequence", "row")


class Edge(NamedTuple):
    """The exchange with one neighbour: one token for each of n pieces (sequences, or the row as one piece).

    sent: [n], positions of the tokens for the neighbour. places: [n], positions that receive the neighbour's tokens
    and hold zero before. arrives: which received tokens continue a sequence here.
    """

    sent: Tensor
    places: Tensor
    arrives: Mask


class RankRollIndex(RollIndex):
    """The index of one rank's share of a row, t = T / cp tokens.

    mask, in_sequence, valid: as in shim.ops.roll.RollIndex, for the tokens of this rank. The mask leaves out
    tokens whose successor is on another rank. following, preceding: the edges to the next and the previous rank, None
    at the ends.
    """

    def __init__(
        self,
        mask: Mask,
        places: Callable[[], tuple[Tensor, Tensor]],
        following: Edge | None,
        preceding: Edge | None,
    ) -> None:
        super().__init__(mask, places)
        self.following = following
        self.preceding = preceding


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

    cu_seqlens, cu_seqlens_padded: int32 or int64 [N + 1], global, as in shim.ops.roll. No host read on CUDA. The
    number of kernels does not depend on N. ValueError (on CUDA a device-side assertion) if a slot cannot be split
    evenly. ValueError for an unknown partition.
    """
    if partition not in PARTITIONS:
        raise ValueError(f"partition is {partition!r}; it must be one of {', '.join(PARTITIONS)}")
    cu, slots = lengths_on(torch.device(device), cu_seqlens, cu_seqlens_padded)
    given = cu, slots, length, rank, ranks
    return _of_few(*given) if partition == "sequence" and are_few(cu, runs=2) else _of_any(*given, partition)


def _of_few(cu: Tensor, slots: Tensor, length: int, rank: int, ranks: int) -> RankRollIndex:
    """The same in numbers of the host: some ten numbers take less than thirty kernels."""
    ends, starts = cu.tolist(), slots.tolist()
    if any(start % ranks for start in starts):
        raise ValueError(_uneven(ranks))
    runs, chunks = [], []
    for start, end, first, last in zip(starts, starts[1:], ends, ends[1:]):
        here, share = start // ranks, (end - start) // ranks
        front, tail = (share + 1) // 2, share // 2
        both = ((here, rank * front, front), (here + front, ranks * front + (ranks - 1 - rank) * tail, tail))
        final = last - first - 1  # the token without a successor
        for number, (place, there, size) in enumerate(both):
            inner = size if number == 0 and rank == ranks - 1 else size - 1
            runs.append((place, place + max(min(final - there, inner), 0)))
        chunks.append([(place, size, final - there >= size) for place, there, size in both])

    def on_rank(places: list[int]) -> Tensor:
        return torch.tensor([min(max(place, 0), max(length - 1, 0)) for place in places])

    def edge(sent: int, received: int) -> Edge:
        kept = [(piece, piece + 1) for piece, chunk in enumerate(chunks) if chunk[received][2]]
        return Edge(
            on_rank([chunk[sent][0] for chunk in chunks]),
            on_rank([place + size - 1 for place, size, _ in (chunk[received] for chunk in chunks)]),
            Mask(None, gaps(kept, len(chunks))),
        )

    def places() -> tuple[Tensor, Tensor]:
        index = _of_any(cu, slots, length, rank, ranks, "sequence")
        return index.in_sequence, index.valid

    return RankRollIndex(Mask(None, gaps(runs, length)), places, *_edges(edge, rank, ranks))


def _of_any(cu: Tensor, slots: Tensor, length: int, rank: int, ranks: int, partition: str) -> RankRollIndex:
    device, lengths = cu.device, cu[1:] - cu[:-1]
    # For each piece: its start on this rank, the lengths of its chunks, and the range of positions with a successor.
    # Numbers if the row is one piece, tensors [n] for sequences.
    start: Any
    front: Any
    tail: Any
    if partition == "row":
        start, front, tail = 0, (length + 1) // 2, length // 2
        begin, end = slots[:-1], slots[:-1] + (lengths - 1).clamp_(min=0)
    else:
        require((slots % ranks == 0).all(), _uneven(ranks))
        starts = torch.div(slots, ranks, rounding_mode="floor")
        start, share = starts[:-1], starts[1:] - starts[:-1]
        front = (share + 1) >> 1  # an odd share has the longer front, as with torch.chunk
        tail = share - front
        begin, end = None, lengths - 1
    chunks = (  # start on this rank, start in the piece, length
        (start, rank * front, front),
        (start + front, ranks * front + (ranks - 1 - rank) * tail, tail),
    )
    run_starts, run_ends = [], []
    for number, (here, there, size) in enumerate(chunks):
        # The successor of a chunk's last token is on another rank, except for the last front, whose own tail follows.
        inner = size if number == 0 and rank == ranks - 1 else size - 1
        run_ends.append((end - there).clamp_(max=inner).clamp_(min=0).add_(here))
        run_starts.append(here if begin is None else (begin - there).clamp_(max=inner).clamp_(min=0).add_(here))
    mask = mask_of_runs(torch.cat(run_starts), torch.cat(run_ends), length)

    def on_rank(place: Any) -> Tensor:
        if isinstance(place, int):
            place = torch.full((1,), place, device=device, dtype=cu.dtype)
        return place.clamp(min=0, max=max(length - 1, 0))

    def edge(sent: int, received: int) -> Edge:
        here, there, size = chunks[received]
        arrives = end - there >= size
        if begin is not None:
            arrives = (arrives & (begin - there < size)).any(0, keepdim=True)
        return Edge(on_rank(chunks[sent][0]), on_rank(here + size - 1), Mask(arrives.to(torch.int8).neg_()))

    def places() -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, device=device, dtype=cu.dtype)
        (_, of_front, _), (_, of_tail, _) = chunks
        if partition == "row":
            at = positions + torch.where(positions < front, of_front, of_tail - front)
            slot = slot_of(at, slots)
            at = at - slots[slot]
            return at, at < lengths[slot]
        slot = slot_of(positions, starts)
        offset, f = positions - start[slot], front[slot]
        at = offset + torch.where(offset < f, of_front[slot], of_tail[slot] - f)
        # Positions after the last slot hold no token, on every rank.
        return at, at < torch.where(positions < starts[-1], lengths[slot], 0)

    return RankRollIndex(mask, places, *_edges(edge, rank, ranks))


def _uneven(ranks: int) -> str:
    return f"every slot of a packed row must be a multiple of the {ranks} ranks"


def _edges(edge: Callable[[int, int], Edge], rank: int, ranks: int) -> tuple[Edge | None, Edge | None]:
    """Those to the next and the previous rank, of the numbers of the chunk that is sent and the one that receives.

    The first tokens of fronts go to the previous rank, those of tails to the next. A front continues with tokens from
    the next rank, a tail with tokens from the previous.
    """
    return edge(1, 0) if rank < ranks - 1 else None, edge(0, 1) if rank > 0 else None


def _swap(to_previous: Tensor | None, to_next: Tensor | None, group: Any) -> tuple[Tensor | None, Tensor | None]:
    """Send a tensor to each existing neighbour. Returns (from the next rank, from the previous)."""
    from_next = from_previous = None
    if to_previous is None and to_next is None:
        return from_next, from_previous
    ranks, me = dist.get_process_group_ranks(group), group.rank()
    messages = []
    if to_previous is not None:
        to_previous, from_previous = to_previous.contiguous(), torch.empty_like(to_previous)
        messages.append(dist.P2POp(dist.isend, to_previous, ranks[me - 1], group))
        messages.append(dist.P2POp(dist.irecv, from_previous, ranks[me - 1], group))
    if to_next is not None:
        to_next, from_next = to_next.contiguous(), torch.empty_like(to_next)
        messages.append(dist.P2POp(dist.irecv, from_next, ranks[me + 1], group))
        messages.append(dist.P2POp(dist.isend, to_next, ranks[me + 1], group))
    for request in dist.batch_isend_irecv(messages):
        request.wait()
    return from_next, from_previous


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, to_previous: Tensor | None, to_next: Tensor | None, group: Any) -> Any:
        ctx.group = group
        return _swap(to_previous, to_next, group)

    @staticmethod
    def backward(ctx: Any, from_next: Tensor | None, from_previous: Tensor | None) -> Any:
        # Gradients go back the way the tokens came.
        of_next, of_previous = _swap(from_previous, from_next, ctx.group)
        return of_previous, of_next, None


def roll_on_rank(tensor: Tensor, index: RankRollIndex, dim: int, group: Any) -> Tensor:
    """Shift this rank's share of a packed row left by one inside each sequence.

    tensor: any dtype and rank, ``tensor.size(dim)`` = t, the same on all ranks of `group`. Differentiable if all ranks
    run backward. At most one message to and one from each neighbour, for any number of sequences.
    """
    if tensor.size(dim) == 0:
        return tensor.clone()
    # Some backends send neither bool nor eight-bit floats, but all send bytes.
    given = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    edges = index.following, index.preceding
    to_next, to_previous = (None if edge is None else given.index_select(dim, edge.sent) for edge in edges)
    # Tokens, labels and masks have no gradient, so they skip the cost of autograd.
    exchange = _Exchange.apply if tensor.requires_grad else _swap
    received = exchange(to_previous, to_next, group)
    rolled = roll_with(given, index, dim)
    for edge, values in zip(edges, received):
        if edge is not None:
            # Added, because an empty piece has no position: it adds zero to another piece's.
            rolled.index_add_(dim, edge.places, edge.arrives.clear_(values, dim))
    return rolled.view(tensor.dtype) if given is not tensor else rolled
