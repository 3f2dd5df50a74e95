"""Which rows of a buffer are valid, as tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ValidRows", "valid_rows"]


@dataclass(frozen=True)
class ValidRows:
    """The valid rows among `rows` rows.

    count: int64 [1], the number of valid rows. place: int64 [rows], the index of each row among the valid rows, -1 for
    invalid rows; None if the valid rows are the first ones.
    """

    rows: int
    count: Tensor
    place: Tensor | None

    @property
    def places(self) -> Tensor:
        """`place`, or indices 0, 1, ... if it is None. An index from `count` on is that of an invalid row."""
        if self.place is not None:
            return self.place
        return torch.arange(self.rows, device=self.count.device)

    def blocks_of(self, size: int) -> ValidRows:
        """The valid rows of a tensor with one row for every `size` of these. Only for valid rows that come first."""
        return ValidRows(self.rows // size, (self.count + size - 1) // size, None)

    def part(self, first: int, rows: int) -> ValidRows:
        """The valid rows of a tensor that has `rows` of these rows, from `first` on."""
        if self.place is None:
            return ValidRows(rows, (self.count - first).clamp(0, rows), None)
        before = (self.place[:first] >= 0).sum()
        place = self.place[first : first + rows]
        valid = place >= 0
        return ValidRows(rows, valid.sum(0, keepdim=True), torch.where(valid, place - before, -1))


def valid_rows(rows: int, valid: Tensor | int | None, device: torch.device) -> ValidRows:
    """The valid rows, from `valid` in any of its forms.

    valid: None for all rows; a number, or an integer tensor of one element, for the first rows; an integer tensor
    [segments] for the first rows of each of `segments` equal parts; a bool tensor [rows] for any rows.

    The host reads nothing. Counts are clamped to the number of rows. ValueError for a shape that does not fit.
    """
    if valid is None or isinstance(valid, int):
        first = rows if valid is None else max(0, min(valid, rows))
        return ValidRows(rows, torch.full((1,), first, dtype=torch.int64, device=device), None)
    valid = valid.detach().to(device)
    if valid.dtype != torch.bool and valid.numel() == 1 and not valid.is_floating_point():
        return ValidRows(rows, valid.reshape(1).to(torch.int64, copy=True).clamp_(0, rows), None)
    if valid.dtype != torch.bool:
        if valid.is_floating_point() or valid.dim() != 1 or not valid.numel() or rows % valid.numel():
            what = f"{valid.dtype} of shape {tuple(valid.shape)}"
            raise ValueError(f"valid is {what}, but it must be the number of rows in each equal segment of {rows} rows")
        capacity = rows // valid.numel()
        valid = (torch.arange(capacity, device=device) < valid[:, None]).flatten()
    if valid.shape != (rows,):
        raise ValueError(f"the mask of valid rows has shape {tuple(valid.shape)}; it must have ({rows},)")
    place = torch.where(valid, valid.cumsum(0) - 1, -1)
    return ValidRows(rows, valid.sum(0, keepdim=True), place)
