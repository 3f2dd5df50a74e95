"""Shift packed (THD) rows left by one inside each sequence, without a loop over sequences and without host reads.

A row holds N sequences one after another. `cu_seqlens` [N + 1] are the cumulative valid lengths, starting at 0;
`cu_seqlens_padded` [N + 1] are the cumulative lengths of the slots the sequences lie in, where there is padding
between them. Sequence i occupies positions ``padded[i] .. padded[i] + (cu[i + 1] - cu[i])`` of the row, the rest of
its slot is padding, and so is all that follows the last slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["RollIndex", "lengths_on", "packed_roll", "roll_index", "roll_with"]


class RollIndex(NamedTuple):
    """What is known of each of the T positions of a row.

    continues: bool [T], True where the next position is a valid token of the same sequence.
    in_sequence: [T], the position inside the slot.
    valid: bool [T], True on tokens, False on padding.
    """

    continues: Tensor
    in_sequence: Tensor
    valid: Tensor


def lengths_on(device: torch.device, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None) -> tuple[Tensor, Tensor]:
    """(cu_seqlens, slots) on `device` in one dtype, at least one sequence in them; ValueError for other shapes.

    A copy to the tensor's device does not wait; one from the device to the host would.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"cu_seqlens must have the shape [N + 1], not {list(cu_seqlens.shape)}")
    if cu_seqlens_padded is not None and cu_seqlens_padded.shape != cu_seqlens.shape:
        raise ValueError(
            f"cu_seqlens_padded has the shape {list(cu_seqlens_padded.shape)}, cu_seqlens {list(cu_seqlens.shape)}"
        )
    cu = cu_seqlens.to(device, non_blocking=True)
    slots = cu if cu_seqlens_padded is None else cu_seqlens_padded.to(device, cu.dtype, non_blocking=True)
    # A row without sequences is a row with one that is empty.
    return (cu, slots) if cu.numel() > 1 else (cu.expand(2), slots.expand(2))


def roll_index(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, length: int, device: torch.device | str
) -> RollIndex:
    """The index of a row of `length` = T tokens.

    cu_seqlens, cu_seqlens_padded: integer [N + 1] (see the module). ValueError where the shapes do not fit. The number
    of kernels does not depend on N, and nothing is read back.
    """
    device = torch.device(device)
    cu, slots = lengths_on(device, cu_seqlens, cu_seqlens_padded)
    positions = torch.arange(length, device=device, dtype=cu.dtype)
    # Slots of no length end where they begin: right=True steps over them. Behind the last slot no length is left.
    slot = torch.bucketize(positions, slots[1:], right=True).clamp_(max=cu.numel() - 2)
    in_sequence, lengths = positions - slots[slot], (cu[1:] - cu[:-1])[slot]
    return RollIndex(in_sequence + 1 < lengths, in_sequence, in_sequence < lengths)


def roll_with(tensor: Tensor, index: RollIndex, dim: int = -1) -> Tensor:
    """Shift `tensor` left by one along `dim`; zero where the sequence does not continue.

    Any dtype, rank and dimension; differentiable; returns a new tensor of the same shape. Three kernels.
    """
    shape = [1] * tensor.dim()
    shape[dim] = tensor.size(dim)
    # The eight-bit floats have no masked_fill; their zero is the zero byte.
    bytes_only = tensor.is_floating_point() and tensor.element_size() == 1
    rolled = torch.roll(tensor.view(torch.uint8) if bytes_only else tensor, -1, dim)
    rolled = rolled.masked_fill_(~index.continues.view(shape), 0)
    return rolled.view(tensor.dtype) if bytes_only else rolled


def packed_roll(tensor: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None = None, dim: int = -1) -> Tensor:
    """Shift every sequence of a packed row left by one along `dim`.

    The last valid position of each sequence, all padding, and everything after the last sequence become zero; no
    token crosses into another sequence. tensor: any dtype and rank, ``tensor.size(dim)`` = T, differentiable.
    cu_seqlens, cu_seqlens_padded: integer [N + 1], as in the module. Returns a new tensor of the same shape.
    ValueError where the shapes of the cumulative lengths do not fit.
    """
    return roll_with(tensor, roll_index(cu_seqlens, cu_seqlens_padded, tensor.size(dim), tensor.device), dim)
