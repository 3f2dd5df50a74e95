"""Pages by torch's own operations: the reference, for any device. Shapes are static, and the host reads nothing.

Each buffer has two extra rows at its end. Rows that must not be stored are written to one; invalid rows are read from
the other, which holds zeros. Likewise one extra slot of the ring takes pages that are not given back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shim.ops._stash_layout import (
    HEAD,
    HOST_HEAD,
    HOST_TAIL,
    IN_POOL,
    KEPT,
    LOST,
    MOST_WANTED,
    NOWHERE,
    ON_HOST,
    RELEASED,
    SPILLED,
    STASHED,
    TAIL,
    WANTED,
    Pages,
)
from shim.ops._stash_rows import ValidRows

__all__ = ["NOWHERE", "allocate", "load", "release", "store"]


def allocate(pool: Pages, count: Tensor, pages: Tensor, where: Tensor, kept: bool) -> None:
    """Take pages for `count` [1] rows. Write their ids to `pages`, and the place of the copy to `where` [1].

    kept: whether the host keeps the tensor if there are too few pages. If not, the tensor is lost.
    """
    state = pool.state
    need = _pages(pool, count)
    here = state[TAIL] - state[HEAD] >= need
    there = ~here & (state[HOST_TAIL] - state[HOST_HEAD] >= need) & (pool.host_pages > 0)
    nowhere = ~(here | there)
    slots = torch.arange(pages.numel(), device=pages.device)
    ids = pool.ring[(state[HEAD] + slots) % max(pool.pages, 1)]
    if pool.host_pages:
        ids = torch.where(here, ids, pool.host_ring[(state[HOST_HEAD] + slots) % pool.host_pages])
    pages.copy_(torch.where((slots < need) & ~nowhere, ids, -1))
    where.copy_(IN_POOL * here + ON_HOST * there + NOWHERE * nowhere)
    for place, change in (
        (HEAD, need * here),
        (HOST_HEAD, need * there),
        (WANTED, need),
        (STASHED, here),
        (SPILLED, there),
        (KEPT if kept else LOST, nowhere),
    ):
        state[place : place + 1].add_(change)
    state[MOST_WANTED].copy_(torch.maximum(state[MOST_WANTED], state[WANTED]))


def store(pool: Pages, tensor: Tensor, rows: ValidRows, pages: Tensor, where: Tensor) -> None:
    """Copy the valid rows of `tensor` [rows, width] into their pages."""
    row, valid = _rows(pool, rows, pages)
    pool.data.index_copy_(0, torch.where(valid & (where == IN_POOL), row, pool.unused_row(pool.pages)), tensor)
    if pool.host_pages:
        unused = pool.unused_row(pool.host_pages)
        pool.host_data.index_copy_(0, torch.where(valid & (where == ON_HOST), row, unused), tensor)


def load(pool: Pages, out: Tensor, rows: ValidRows, pages: Tensor, where: Tensor) -> None:
    """Copy the valid rows back into `out` [rows, width]. Other rows become zeros."""
    row, valid = _rows(pool, rows, pages)
    zeros = pool.zero_row(pool.pages)
    torch.index_select(pool.data, 0, torch.where(valid & (where == IN_POOL), row, zeros), out=out)
    if pool.host_pages:
        zeros = pool.zero_row(pool.host_pages)
        out |= pool.host_data.index_select(0, torch.where(valid & (where == ON_HOST), row, zeros))


def release(pool: Pages, count: Tensor, pages: Tensor, where: Tensor) -> None:
    """Give the pages back. Further calls do nothing."""
    state = pool.state
    need = _pages(pool, count)
    slots = torch.arange(pages.numel(), device=pages.device)
    _return_pages(pool.ring, pool.pages, state[TAIL : TAIL + 1], pages, slots, need * (where == IN_POOL))
    if pool.host_pages:
        tail = state[HOST_TAIL : HOST_TAIL + 1]
        _return_pages(pool.host_ring, pool.host_pages, tail, pages, slots, need * (where == ON_HOST))
    state[WANTED : WANTED + 1].sub_(need * (where != RELEASED))
    where.zero_()


def _return_pages(ring: Tensor, capacity: int, tail: Tensor, pages: Tensor, slots: Tensor, need: Tensor) -> None:
    slot = torch.where(slots < need, (tail + slots) % max(capacity, 1), capacity)
    ring.index_copy_(0, slot, pages)
    tail.add_(need)


def _pages(pool: Pages, count: Tensor) -> Tensor:
    return (count + pool.page_size - 1) // pool.page_size


def _rows(pool: Pages, rows: ValidRows, pages: Tensor) -> tuple[Tensor, Tensor]:
    """The buffer row of each row of a tensor, and whether the row is valid."""
    places = rows.places
    valid = (places >= 0) & (places < rows.count)
    first = places.clamp(min=0)
    return pages[first // pool.page_size] * pool.page_size + first % pool.page_size, valid
