"""Pages by Triton kernels: the functions of _stash_eager in one launch each, without scratch.

The module is imported only for a kernel, because Triton imports slowly and is not always installed. TRITON_INTERPRET=1,
set before the import, interprets the kernels on CPU.
"""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shim.ops import _stash_layout as layout
from shim.ops._stash_layout import BITS
from shim.ops._stash_rows import ValidRows

if TYPE_CHECKING:
    from shim.ops._stash_layout import Pages

__all__ = ["allocate", "check_device", "load", "release", "store"]

_HEAD = tl.constexpr(layout.HEAD)
_TAIL = tl.constexpr(layout.TAIL)
_HOST_HEAD = tl.constexpr(layout.HOST_HEAD)
_HOST_TAIL = tl.constexpr(layout.HOST_TAIL)
_WANTED = tl.constexpr(layout.WANTED)
_MOST_WANTED = tl.constexpr(layout.MOST_WANTED)
_STASHED = tl.constexpr(layout.STASHED)
_SPILLED = tl.constexpr(layout.SPILLED)
_RELEASED = tl.constexpr(layout.RELEASED)
_IN_POOL = tl.constexpr(layout.IN_POOL)
_ON_HOST = tl.constexpr(layout.ON_HOST)
_NOWHERE = tl.constexpr(layout.NOWHERE)

_SLOTS = 1024  # entries of a list of pages at a time
_TILE = 2048  # elements of a tensor that a program copies at a time
_SQUARE = 64  # rows and columns of a tile if no row is contiguous
_PROGRAMS = 8  # per multiprocessor

# Arguments that must not specialise a kernel: sizes without an effect on its code, and pointers into lists. So a kernel
# that ran once, such as before the capture of a CUDA graph, is not compiled again for other values.
_VARYING = ["count", "where", "capacity", "host_capacity", "page_size", "slots", "refused", "rows", "width"]


def _jit(function: Any) -> Any:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(do_not_specialize=[name for name in _VARYING if name in names])(function)


@_jit
def _allocate_kernel(
    state,
    ring,
    host_ring,
    count,
    pages,
    where,
    capacity,
    host_capacity,
    page_size,
    slots,
    refused,
    BLOCK: tl.constexpr,
):
    """A single program. refused: the counter for a tensor that finds no pages."""
    need = (tl.load(count) + page_size - 1) // page_size
    head = tl.load(state + _HEAD)
    here = tl.load(state + _TAIL) - head >= need
    host_head = tl.load(state + _HOST_HEAD)
    there = tl.load(state + _HOST_TAIL) - host_head >= need
    place = tl.where(here, _IN_POOL, tl.where(there, _ON_HOST, _NOWHERE))
    counter = tl.where(here, _STASHED, tl.where(there, _SPILLED, refused))
    taken = tl.where(place == _NOWHERE, 0, need)
    source = tl.where(here, ring, host_ring)
    size = tl.where(here, capacity, host_capacity)
    first = tl.where(here, head, host_head) % tl.maximum(size, 1)
    for start in range(0, slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        at = first + slot
        at = tl.where(at < size, at, at - size)  # at most one wrap, because no caller takes more than the ring holds
        page = tl.load(source + at, mask=slot < taken, other=-1)
        tl.store(pages + slot, page, mask=slot < slots)
    wanted = tl.load(state + _WANTED) + need
    most = tl.maximum(tl.load(state + _MOST_WANTED), wanted)
    tensors = tl.load(state + counter) + 1
    tl.debug_barrier()  # all warps have read the state before one writes it
    tl.store(state + _HEAD, head + tl.where(place == _IN_POOL, need, 0))
    tl.store(state + _HOST_HEAD, host_head + tl.where(place == _ON_HOST, need, 0))
    tl.store(state + _WANTED, wanted)
    tl.store(state + _MOST_WANTED, most)
    tl.store(state + counter, tensors)
    tl.store(where, place.to(tl.int64))


@_jit
def _release_kernel(
    state,
    ring,
    host_ring,
    count,
    pages,
    where,
    capacity,
    host_capacity,
    page_size,
    BLOCK: tl.constexpr,
):
    """A single program."""
    place = tl.load(where)
    need = tl.where(place == _RELEASED, 0, (tl.load(count) + page_size - 1) // page_size)
    given = tl.where(place == _NOWHERE, 0, need)
    tail = tl.load(state + _TAIL)
    host_tail = tl.load(state + _HOST_TAIL)
    there = place == _ON_HOST
    target = tl.where(there, host_ring, ring)
    size = tl.where(there, host_capacity, capacity)
    first = tl.where(there, host_tail, tail) % tl.maximum(size, 1)
    start = tl.zeros([], tl.int64)
    while start < given:
        slot = start + tl.arange(0, BLOCK)
        at = first + slot
        at = tl.where(at < size, at, at - size)
        page = tl.load(pages + slot, mask=slot < given, other=0)
        tl.store(target + at, page, mask=slot < given)
        start += BLOCK
    wanted = tl.load(state + _WANTED) - need
    tl.debug_barrier()  # all warps have read the state before one writes it
    tl.store(state + _TAIL, tail + tl.where(place == _IN_POOL, need, 0))
    tl.store(state + _HOST_TAIL, host_tail + tl.where(place == _ON_HOST, need, 0))
    tl.store(state + _WANTED, wanted)
    tl.store(where, tl.zeros([], tl.int64) + _RELEASED)


@_jit
def _copy_kernel(
    tensor,
    data,
    host_data,
    count,
    place,
    pages,
    where,
    rows,
    width,
    row_stride,
    column_stride,
    LOADS: tl.constexpr,
    PLACED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Each program copies every n-th block of rows in one block of columns.

    width and row_stride count units of UNIT elements, which tells the compiler that they are multiples of UNIT.
    """
    found = tl.load(where)
    buffer = tl.where(found == _ON_HOST, host_data, data)
    valid = tl.where(found == _IN_POOL, 1, tl.where(found == _ON_HOST, 1, 0)) * tl.load(count)
    end = rows.to(tl.int64)
    if not LOADS:  # a load also writes the invalid rows
        if PLACED:
            end = tl.where(valid > 0, end, 0)
        else:
            end = tl.minimum(end, valid)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = column < width * UNIT
    start = tl.program_id(1).to(tl.int64) * ROWS
    while start < end:
        row = start + tl.arange(0, ROWS)
        if PLACED:
            at = tl.load(place + row, mask=row < end, other=-1)
        else:
            at = tl.where(row < end, row, -1)
        held = (at >= 0) & (at < valid)
        page = tl.load(pages + at // PAGE_SIZE, mask=held, other=0)
        from_row = (page * PAGE_SIZE + at % PAGE_SIZE)[:, None] * width * UNIT
        of_pages = buffer + from_row + column
        of_tensor = tensor + row[:, None] * row_stride * UNIT + column.to(tl.int64) * column_stride
        if LOADS:
            value = tl.load(of_pages, mask=held[:, None] & inside, other=0)
            tl.store(of_tensor, value, mask=(row < end)[:, None] & inside)
        else:
            value = tl.load(of_tensor, mask=held[:, None] & inside)
            tl.store(of_pages, value, mask=held[:, None] & inside)
        start += tl.num_programs(1) * ROWS


def check_device(device: torch.device) -> None:
    """Raise RuntimeError if the kernels cannot run on `device`."""
    if device.type == "cpu" and isinstance(_copy_kernel, triton.JITFunction):
        raise RuntimeError(
            "the kernels of the paged stash need a GPU: use backend='eager' on CPU, or set TRITON_INTERPRET=1 before "
            "Triton is imported, which interprets them"
        )


def allocate(pool: Pages, count: Tensor, pages: Tensor, where: Tensor, kept: bool) -> None:
    """Take pages for `count` [1] rows. Write their ids to `pages`, and the place of the copy to `where` [1].

    kept: whether the host keeps the tensor if there are too few pages. If not, the tensor is lost.
    """
    check_device(pool.state.device)
    with torch.cuda.device_of(pool.state):
        _allocate_kernel[(1,)](
            *_lists(pool, count, pages, where),
            pages.numel(),
            layout.KEPT if kept else layout.LOST,
            BLOCK=_SLOTS,
            num_warps=4,
        )


def release(pool: Pages, count: Tensor, pages: Tensor, where: Tensor) -> None:
    """Give the pages back. Further calls do nothing."""
    with torch.cuda.device_of(pool.state):
        _release_kernel[(1,)](*_lists(pool, count, pages, where), BLOCK=_SLOTS, num_warps=4)


def store(pool: Pages, tensor: Tensor, rows: ValidRows, pages: Tensor, where: Tensor) -> None:
    """Copy the valid rows of `tensor` [rows, width], of any strides, into their pages."""
    _copy(pool, tensor, rows, pages, where, loads=False)


def load(pool: Pages, out: Tensor, rows: ValidRows, pages: Tensor, where: Tensor) -> None:
    """Copy the valid rows back into `out` [rows, width], of any strides. Other rows become zeros."""
    _copy(pool, out, rows, pages, where, loads=True)


def _lists(pool: Pages, count: Tensor, pages: Tensor, where: Tensor) -> tuple[Any, ...]:
    return (
        pool.state,
        pool.ring,
        pool.host_ring,
        count,
        pages,
        where,
        pool.pages,
        pool.host_pages,
        pool.page_size,
    )


def _copy(pool: Pages, tensor: Tensor, rows: ValidRows, pages: Tensor, where: Tensor, loads: bool) -> None:
    if not tensor.numel():
        return
    unit, data, host_data = 1, pool.data, pool.host_data
    if tensor.stride(1) == 1:
        unit, tensor, data, host_data = _widened(tensor, data, host_data)
    width = tensor.shape[1]
    row_block, column_block = _tile(tensor)
    column_blocks = triton.cdiv(width, column_block)
    programs = triton.cdiv(_programs(tensor.device), column_blocks)
    with torch.cuda.device_of(tensor):
        _copy_kernel[(column_blocks, min(triton.cdiv(rows.rows, row_block), programs))](
            tensor,
            data,
            host_data,
            rows.count,
            pages if rows.place is None else rows.place,
            pages,
            where,
            rows.rows,
            width // unit,
            tensor.stride(0) // unit,
            tensor.stride(1),
            LOADS=loads,
            PLACED=rows.place is not None,
            PAGE_SIZE=pool.page_size,
            UNIT=unit,
            ROWS=row_block,
            COLUMNS=column_block,
            num_warps=4,
        )


def _widened(*tensors: Tensor) -> tuple[Any, ...]:
    """(unit, the tensors [rows, width] viewed as the widest words that fit the rows of all).

    unit: the number of words, 16 bytes at most, that can be copied at once: every row begins at a multiple of it.
    """
    size = tensors[0].element_size()
    together = 16
    for tensor in tensors:
        start = tensor.data_ptr(), tensor.storage_offset() * size  # torch checks the offset, the device the address
        together = gcd(together, *start, tensor.stride(0) * size, tensor.shape[1] * size)
    word = min(together, 8)
    if word < size:
        return (1, *tensors)
    return (together // word, *(tensor.view(BITS[word]) for tensor in tensors))


def _tile(tensor: Tensor) -> tuple[int, int]:
    """The rows and columns that a program copies at a time."""
    rows, width = (triton.next_power_of_2(size) for size in tensor.shape)
    if tensor.stride(1) != 1:
        # Neighbouring addresses form a column in the tensor, but a row in the pages.
        return min(rows, _SQUARE), min(width, _SQUARE)
    columns = min(width, _TILE)
    return min(rows, _TILE // columns), columns


@cache
def _programs(device: torch.device) -> int:
    """How many programs share the work, so that a tensor of any size takes one wave."""
    if device.type != "cuda":
        return _PROGRAMS
    return _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
