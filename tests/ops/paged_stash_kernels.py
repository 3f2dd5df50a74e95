"""Kernels of the paged stash against its reference: in Triton's interpreter where that is on, else on a GPU.

Not collected by its name: test_paged_stash_triton.py runs it in the interpreter, tests/gpu/test_paged_stash.py there.
"""

import os
import random
from functools import cache

import pytest
import torch

from shim.ops import _stash_eager, _stash_triton
from shim.ops._stash_eager import HEAD, KEPT, LOST, SPILLED, STASHED, TAIL, WANTED
from shim.ops._stash_pool import BITS, PagePool
from shim.ops._stash_rows import valid_rows
from shim.ops.paged_stash import PagedStash

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU, DEVICE = torch.device("cpu"), torch.device("cpu" if INTERPRETED else "cuda")
GARBAGE = 77

# dtype, width, page size, rows, pages, pages on the host
CASES = {
    "wide words": (torch.float32, 8, 1, 13, 30, 0),
    "odd rows on two pools": (torch.float32, 7, 3, 13, 6, 5),
    "two bytes": (torch.bfloat16, 16, 4, 12, 5, 3),
    "only a host pool": (torch.bfloat16, 5, 4, 12, 0, 4),
    "no pool": (torch.float32, 8, 4, 12, 0, 0),
    "one byte": (torch.uint8, 33, 64, 70, 2, 1),
    "eight-bit floats": (torch.float8_e4m3fn, 32, 3, 20, 12, 7),
    "eight bytes": (torch.float64, 3, 4, 9, 4, 0),
    "eight bytes, two at once": (torch.float64, 2, 4, 9, 4, 0),
    "one row": (torch.float64, 2, 1, 1, 2, 1),
    "one column": (torch.bfloat16, 1, 4, 30, 12, 3),
    "no rows": (torch.float32, 8, 4, 0, 3, 0),
    "many blocks of columns and rows": (torch.float32, 2051, 4, 20, 8, 6),
    "many square blocks": (torch.bfloat16, 130, 64, 140, 5, 4),
    "long lists of pages": (torch.bfloat16, 4, 1, 1500, 2300, 1600),
}
LAYOUTS = ("rows", "half of the columns", "every other column", "columns", "not aligned")


def laid_out(layout, rows, width, dtype, device):
    """(all of the memory, a tensor [rows, width] in it)"""
    size = rows * width * (2 if layout in ("half of the columns", "every other column") else 1) + 1
    memory = torch.full((size,), GARBAGE, dtype=BITS[dtype.itemsize], device=device)
    tensor = memory[1:] if layout == "not aligned" else memory[:-1]
    if layout == "half of the columns":
        return memory, tensor.view(rows, 2 * width)[:, width:]
    if layout == "every other column":
        return memory, tensor.view(rows, 2 * width)[:, ::2]
    if layout == "columns":
        return memory, tensor.view(width, rows).t()
    return memory, tensor.view(rows, width)


class Pair:
    """The reference on CPU and the kernels, which are given the same to do and have to come to the same."""

    def __init__(self, dtype, width, page_size, rows, pages, host_pages):
        self.dtype, self.rows, self.width = dtype, rows, width
        self.pools = [
            PagePool(dtype, width, page_size, pages, host_pages, device, backend)
            for device, backend in ((CPU, _stash_eager), (DEVICE, _stash_triton))
        ]
        for pool in self.pools:
            pool.data.zero_()
            pool.host_data.zero_()

    def same(self, ours, theirs):
        assert torch.equal(ours, theirs.cpu()), (ours, theirs)

    def check(self):
        reference, pool = self.pools
        self.same(reference.state, pool.state)
        for name, pages in (("ring", pool.pages), ("host_ring", pool.host_pages)):
            self.same(getattr(reference, name)[:pages], getattr(pool, name)[:pages])
        for name, pages in (("data", pool.pages), ("host_data", pool.host_pages)):
            used = pool.unused_row(pages)  # the row of zeros is before it
            self.same(getattr(reference, name)[:used], getattr(pool, name)[:used])

    def store(self, valid, kept, layout):
        content = torch.randint(0, 256, (self.rows, self.width * self.dtype.itemsize), dtype=torch.uint8)
        held = []
        for pool in self.pools:
            tensor = laid_out(layout, self.rows, self.width, self.dtype, pool.device)[1]
            tensor.copy_(content.view(tensor.dtype))
            rows = valid_rows(self.rows, valid, pool.device)
            pages = torch.full((-(-self.rows // pool.page_size),), GARBAGE, device=pool.device)
            where = torch.zeros(3, dtype=torch.int64, device=pool.device)[1:2]
            pool.store(tensor, rows, pages, where, expected=1, kept=kept)
            held.append((rows, pages, where))
        self.same(*(pages for _, pages, _ in held))
        self.same(*(where for *_, where in held))
        return held

    def load(self, held, layout):
        memories = []
        for pool, (rows, pages, where) in zip(self.pools, held):
            memory, out = laid_out(layout, self.rows, self.width, self.dtype, pool.device)
            pool.load(out, rows, pages, where)
            memories.append(memory)
        self.same(*memories)
        return memories

    def release(self, held, again):
        for pool, (rows, pages, where) in zip(self.pools, held):
            pool.give_back(rows, pages, where, 1, False)
            if again:
                pool.backend.release(pool, rows.count, pages, where)
            assert not where.item()


def some_rows(rows):
    """As much as any caller may say about which of so many rows are valid."""
    segments = random.choice([n for n in range(2, 6) if rows % n == 0] or [1])
    return random.choice(
        [
            None,
            0,
            random.randint(0, rows),
            torch.tensor([random.randint(0, rows)]),
            torch.randint(0, rows // segments + 1, (segments,)),
            torch.rand(rows) < random.choice([0.0, 0.2, 0.9, 1.0]),
        ]
    )


@cache
def sequence(case):
    """Stores, loads and releases at random, equal at every step; the pool's state at the end."""
    random.seed(case)
    torch.manual_seed(random.randrange(1 << 30))
    pair, stashed = Pair(*CASES[case]), []
    for _ in range(16):
        what = random.choice(["store", "store", "load", "release"])
        if what == "store" or not stashed:
            stashed.append(pair.store(some_rows(pair.rows), random.random() < 0.5, random.choice(LAYOUTS)))
        elif what == "load":
            pair.load(random.choice(stashed), random.choice(LAYOUTS))
        else:
            held = stashed.pop(random.randrange(len(stashed)))
            pair.release(held, again=random.random() < 0.5)
            pair.load(held, "rows")
        pair.check()
    for held in stashed:
        pair.release(held, again=False)
    pair.check()
    state = pair.pools[0].state.tolist()
    assert state[TAIL] - state[HEAD] == pair.pools[0].pages and state[WANTED] == 0
    return state


@pytest.mark.parametrize("case", CASES)
def test_kernels_and_reference_come_to_the_same(case):
    sequence(case)


def test_those_sequences_came_to_every_end_and_around_the_ring():
    for end in (STASHED, SPILLED, KEPT, LOST):
        assert sum(sequence(case)[end] for case in CASES) > 5
    assert sum(sequence(case)[HEAD] > CASES[case][4] > 0 for case in CASES) > 3


@pytest.mark.parametrize("store_layout", LAYOUTS)
def test_every_layout_in_and_out(store_layout):
    pair = Pair(torch.bfloat16, 24, 4, 21, 6, 0)
    for valid in (17, torch.rand(21) < 0.5):
        held = pair.store(valid, False, store_layout)
        pair.check()
        for layout in LAYOUTS:
            pair.load(held, layout)
        pair.release(held, again=False)


def test_where_there_was_no_room_nothing_is_written_and_zeros_come_back():
    pair = Pair(torch.float32, 8, 4, 13, 2, 1)
    held = pair.store(13, True, "rows")
    assert held[1][2].item() == _stash_eager.NOWHERE and (held[1][1] == -1).all()
    assert not any(pool.data[: pool.unused_row(2)].any() for pool in pair.pools)
    for memory in pair.load(held, "half of the columns"):
        other, half = memory[:-1].view(13, 2, 8).unbind(1)
        assert not half.any() and (other == GARBAGE).all()


def test_words_are_as_wide_as_all_rows_allow():
    def words(dtype, width, start=0, stride=None):
        memory = torch.zeros(1000, dtype=dtype, device=DEVICE)
        tensor = memory.as_strided((3, width), (stride or width, 1), start)
        unit, tensor, buffer = _stash_triton._widened(tensor, memory.as_strided((3, width), (width, 1)))
        assert tensor.dtype == buffer.dtype and tensor.shape == buffer.shape
        return unit, tensor.dtype, tensor.shape[1]

    assert words(torch.int16, 24) == (2, torch.int64, 6)
    assert words(torch.uint8, 48, start=16, stride=64) == (2, torch.int64, 6)
    assert words(torch.int64, 6) == (2, torch.int64, 6)
    assert words(torch.int64, 3) == (1, torch.int64, 3)
    assert words(torch.int16, 12) == (1, torch.int64, 3)
    assert words(torch.int16, 24, start=4) == (1, torch.int64, 6)
    assert words(torch.int16, 24, stride=26) == (1, torch.int32, 12)
    assert words(torch.uint8, 7) == (1, torch.uint8, 7)


class Experts(torch.nn.Module):
    """Two linear layers and a gated activation between them, whose halves are chunks."""

    def __init__(self, width, dtype):
        super().__init__()
        torch.manual_seed(3)
        self.up = torch.nn.Linear(width, 4 * width, dtype=dtype, device=DEVICE)
        self.down = torch.nn.Linear(2 * width, width, dtype=dtype, device=DEVICE)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(torch.nn.functional.silu(gate) * value)


@pytest.mark.parametrize("overflow", ["keep", "raise", "spill"])
@pytest.mark.parametrize("form", ["prefix", "mask", "segments"])
@pytest.mark.parametrize("width, dtype", [(8, torch.float32), (9, torch.bfloat16)])
def test_gradients_are_those_without_a_stash(width, dtype, form, overflow):
    experts, rows = Experts(width, dtype), 24
    valid = {
        "prefix": torch.tensor([13]),
        "mask": torch.arange(24) % 3 > 0,
        "segments": torch.tensor([8, 0, 3]),
    }[form].to(DEVICE)
    held = valid_rows(rows, valid, DEVICE)
    mask = ((held.places >= 0) & (held.places < held.count))[:, None]
    sizes = {"keep": (5, 0), "raise": (50, 0), "spill": (5, 50)}[overflow]
    stash = PagedStash(sizes[0], host_pages=sizes[1], page_size=4, overflow=overflow, backend="triton")
    x = torch.randn(rows, width, dtype=dtype, device=DEVICE, requires_grad=True)
    upstream = torch.randn(rows, width, dtype=dtype, device=DEVICE) * mask
    inputs = [x, *experts.parameters()]
    expected = torch.autograd.grad(experts(x), inputs, upstream)
    for _ in range(2):
        output = stash.run(experts, x, rows=rows, valid=valid)
        assert stash.live >= 3
        for ours, theirs in zip(torch.autograd.grad(output, inputs, upstream), expected):
            assert torch.equal(ours, theirs)
        assert stash.live == 0
    stash.check()
    statistics = stash.statistics()
    assert statistics.stashed > 0 and (statistics.kept > 0) == (overflow == "keep")
    assert (statistics.spilled > 0) == (overflow == "spill")
    assert all(use.wanted == 0 for use in statistics.pools)
