"""Shift packed (THD) rows left by one inside each sequence, without a loop over sequences and without host reads.

A row holds N sequences one after another. `cu_seqlens` [N + 1] are the cumulative valid lengths, starting at 0. With
padding between sequences, each sequence is in a slot, and `cu_seqlens_padded` [N + 1] are the cumulative lengths of
the slots. Sequence i occupies positions ``padded[i] .. padded[i] + (cu[i + 1] - cu[i])`` of the row. The rest of its
slot is padding, and so is everything after the last slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shim.ops._checks import is_plain

__all__ = [
    "Mask",
    "RollIndex",
    "are_few",
    "gaps",
    "lengths_on",
    "mask_of_runs",
    "packed_roll",
    "roll_index",
    "roll_with",
    "slot_of",
]


_FEW = 8  # runs, which the host of a CPU clears faster between than it makes a mask of all positions

# Integers by width. Zero is all zero bits in every dtype, so masks work on the bits.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Mask:
    """Which positions of a dimension keep their values; the others become zero.

    bits: int8 [T], -1 (all bits set) for a position that keeps its value, else 0.
    gaps: in place of bits, the positions that become zero: the first one of each gap, and how many there are.
    """

    def __init__(self, bits: Tensor | None, gaps: Sequence[tuple[int, int]] = ()) -> None:
        self._as = {} if bits is None else {torch.int8: bits}
        self._gaps = gaps

    def _in(self, dtype: torch.dtype, like: Tensor, dim: int) -> Tensor:
        if dtype not in self._as:
            bits = self._as[torch.int8]
            # Sign extension also sets all bits of the wider integer.
            self._as[dtype] = bits.logical_not() if dtype is torch.bool else bits.to(dtype)
        shape = [1] * like.dim()
        shape[dim] = like.size(dim)
        return self._as[dtype].view(shape)

    def clear_(self, tensor: Tensor, dim: int) -> Tensor:
        """Zero the other positions of `tensor` along `dim`, in place, including NaN and infinity."""
        if not self._as:
            for start, n in self._gaps:
                tensor.narrow(dim, start, n).zero_()
            return tensor
        if tensor.requires_grad or tensor.is_complex():
            return tensor.masked_fill_(self._in(torch.bool, tensor, dim), 0)
        # Several times faster than masked_fill on CPU, and defined for any dtype.
        bits = _BITS[tensor.element_size()]
        tensor.view(bits).bitwise_and_(self._in(bits, tensor, dim))
        return tensor


class RollIndex:
    """The index of a row of T positions.

    mask: keeps a position if the next position is a valid token of the same sequence.
    in_sequence: [T], the position inside the slot.
    valid: bool [T], True on tokens, False on padding.

    A roll needs only the mask. The others are computed at their first read.
    """

    def __init__(self, mask: Mask, places: Callable[[], tuple[Tensor, Tensor]]) -> None:
        self.mask = mask
        self._compute_places = places
        self._places: tuple[Tensor, Tensor] | None = None

    def _computed_places(self) -> tuple[Tensor, Tensor]:
        if self._places is None:
            self._places = self._compute_places()
        return self._places

    @property
    def in_sequence(self) -> Tensor:
        return self._computed_places()[0]

    @property
    def valid(self) -> Tensor:
        return self._computed_places()[1]


def lengths_on(device: torch.device, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None) -> tuple[Tensor, Tensor]:
    """(cu_seqlens, slots) on `device` in one dtype, with at least one sequence. ValueError for other shapes.

    A copy to the device does not wait; a copy from the device to the host would.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"cu_seqlens must have the shape [N + 1], not {list(cu_seqlens.shape)}")
    if cu_seqlens_padded is not None and cu_seqlens_padded.shape != cu_seqlens.shape:
        raise ValueError(
            f"cu_seqlens_padded has the shape {list(cu_seqlens_padded.shape)}, cu_seqlens {list(cu_seqlens.shape)}"
        )
    cu = cu_seqlens.to(device, non_blocking=True)
    slots = cu if cu_seqlens_padded is None else cu_seqlens_padded.to(device, cu.dtype, non_blocking=True)
    # A row without sequences counts as a row with one empty sequence.
    return (cu, slots) if cu.numel() > 1 else (cu.expand(2), slots.expand(2))


def roll_index(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, length: int, device: torch.device | str
) -> RollIndex:
    """The index of a row of `length` = T tokens.

    cu_seqlens, cu_seqlens_padded: int32 or int64 [N + 1] (see the module). ValueError if the shapes do not fit. The
    number of kernels does not depend on N, and the host reads nothing back.
    """
    device = torch.device(device)
    cu, slots = lengths_on(device, cu_seqlens, cu_seqlens_padded)

    def places() -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, device=device, dtype=cu.dtype)
        slot = slot_of(positions, slots)
        in_sequence = positions - slots[slot]
        return in_sequence, in_sequence < cu.diff()[slot]

    if are_few(cu):
        ends, starts = cu.tolist(), slots.tolist()
        runs = [(at, at + max(end - start - 1, 0)) for at, start, end in zip(starts, ends, ends[1:])]
        return RollIndex(Mask(None, gaps(runs, length)), places)
    begin = slots[:-1]
    return RollIndex(mask_of_runs(begin, begin + (cu.diff() - 1).clamp_(min=0), length), places)


def slot_of(positions: Tensor, slots: Tensor) -> Tensor:
    """The slot of each position; after the last slot, the last slot."""
    # Empty slots end where they begin; right=True skips them.
    return torch.bucketize(positions, slots[1:], right=True).clamp_(max=slots.numel() - 2)


def mask_of_runs(starts: Tensor, ends: Tensor, length: int) -> Mask:
    """The mask of `length` positions that keeps those in a run: starts[i] <= position < ends[i]. Runs never overlap."""
    if _may_be_read(starts, _FEW):
        return Mask(None, gaps(sorted(zip(starts.tolist(), ends.tolist())), length))
    # The running sum of steps at both ends of each run. The steps of an empty run cancel. If many steps meet at one
    # position, int8 wraps around and back.
    steps = torch.zeros(length + 1, device=starts.device, dtype=torch.int8)
    down = torch.full_like(starts, -1, dtype=torch.int8)
    steps.index_add_(0, starts.clamp(max=length), down)
    steps.index_add_(0, ends.clamp(max=length), down, alpha=-1)
    return Mask(steps[:length].cumsum(0, dtype=torch.int8))


def are_few(cu: Tensor, runs: int = 1) -> bool:
    """Whether the host may look at the offsets of these sequences, each of so many runs, and clear the gaps."""
    return _may_be_read(cu, _FEW // runs + 1)


def _may_be_read(few: Tensor, most: int) -> bool:
    """Whether the host may look at these numbers, at most so many, without a wait."""
    return few.numel() <= most and few.device.type == "cpu" and is_plain(few) and not torch.compiler.is_compiling()


def gaps(runs: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """What lies before, between and behind runs (start, end), in the order of their starts: start and length."""
    found, at = [], 0
    for start, end in [*runs, (length, length)]:
        if min(start, length) > at:
            found.append((at, min(start, length) - at))
        at = max(at, end)
    return found


def roll_with(tensor: Tensor, index: RollIndex, dim: int = -1) -> Tensor:
    """Shift `tensor` left by one along `dim`; zero at positions whose sequence does not continue.

    Any dtype, rank and dimension; differentiable (backward); returns a new tensor of the same shape. Costs two kernels,
    and one more at the first roll of each dtype width.
    """
    # Some kernels do not exist for bool and eight-bit floats.
    given = tensor.view(torch.int8) if tensor.element_size() == 1 else tensor
    rolled = index.mask.clear_(torch.roll(given, -1, dim), dim)
    return rolled.view(tensor.dtype) if given is not tensor else rolled


def packed_roll(tensor: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None = None, dim: int = -1) -> Tensor:
    """Shift every sequence of a packed row left by one along `dim`.

    The last valid position of each sequence, all padding, and everything after the last sequence become zero; no
    token crosses into another sequence. tensor: any dtype and rank, ``tensor.size(dim)`` = T, differentiable.
    cu_seqlens, cu_seqlens_padded: int32 or int64 [N + 1], as in the module. Returns a new tensor of the same shape.
    ValueError if the shapes of the cumulative lengths do not fit.
    """
    return roll_with(tensor, roll_index(cu_seqlens, cu_seqlens_padded, tensor.size(dim), tensor.device), dim)
