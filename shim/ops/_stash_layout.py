"""The memory layout of a pool of pages, for its readers and writers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["BITS", "NOWHERE", "OVERFLOW", "STATES", "Pages"]

# Rows are copied as integers: every bit stays, and eight-bit floats work, which torch can hardly index.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# The elements of a pool's state. Heads and tails only count up; a ring is indexed by their remainder.
HEAD, TAIL, HOST_HEAD, HOST_TAIL, WANTED, MOST_WANTED, STASHED, SPILLED, KEPT, LOST = range(10)
STATES = 10

OVERFLOW = ("keep", "spill", "raise")  # what may happen to a tensor that finds no page

# Where a tensor's copy is.
RELEASED, IN_POOL, ON_HOST, NOWHERE = range(4)


class Pages(Protocol):
    """The parts of a pool that the functions of a backend take: its buffers and their sizes."""

    data: Tensor  # [rows of all pages and two more, width]
    host_data: Tensor  # the same in host memory, without the two
    ring: Tensor  # [pages + 1], int64: the free pages
    host_ring: Tensor
    state: Tensor  # [STATES], int64
    pages: int
    host_pages: int
    page_size: int

    def unused_row(self, pages: int) -> int: ...

    def zero_row(self, pages: int) -> int: ...
