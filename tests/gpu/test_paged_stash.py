"""The paged stash on a GPU: the same gradients, no waiting, CUDA graphs, pinned memory, streams, and free memory."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from shim.ops.paged_stash import PagedStash, StashOverflowError
from shim.testing.patience import patience

pytestmark = pytest.mark.gpu(engine=False)

TOP = Path(__file__).resolve().parent.parent.parent
ROWS, WIDTH = 1200, 256  # no weight has as many rows
DTYPES = [torch.float32, torch.bfloat16]
BACKENDS = ["triton", "eager"]


class Experts(torch.nn.Module):
    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        torch.manual_seed(3)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH, dtype=dtype, device="cuda")
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH, dtype=dtype, device="cuda")

    def forward(self, x):
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(torch.nn.functional.silu(gate) * value)


class Step:
    """Gradients of experts for rows that a mask of [rows] holds valid, with a stash and without."""

    def __init__(self, dtype=torch.bfloat16, rows=ROWS):
        self.experts, self.rows = Experts(dtype), rows
        self.x = torch.randn(rows, WIDTH, dtype=dtype, device="cuda", requires_grad=True)
        self.upstream = torch.randn(rows, WIDTH, dtype=dtype, device="cuda")
        self.numbers = torch.arange(rows, device="cuda")
        self.inputs = [self.x, *self.experts.parameters()]

    def forward(self, stash, valid):
        if stash is None:
            return self.experts(self.x)
        return stash.run(self.experts, self.x, rows=self.rows, valid=valid)

    def backward(self, output, valid):
        mask = valid if valid.dtype == torch.bool else self.numbers < valid
        return torch.autograd.grad(output, self.inputs, torch.where(mask[:, None], self.upstream, 0))

    def gradients(self, stash, valid):
        return self.backward(self.forward(stash, valid), valid)


def prefix(count):
    return torch.tensor([count], device="cuda")


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs):
        assert torch.equal(one, other)


def assert_all_free(stash):
    assert stash.live == 0 and stash.pools
    for use in stash.statistics().pools:
        assert use.wanted == 0
    for pool in stash.pools.values():
        head, tail, host_head, host_tail = pool.state[:4].tolist()
        assert (tail - head, host_tail - host_head) == (pool.pages, pool.host_pages)


@contextmanager
def no_waiting():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_kernels_do_as_the_reference_does():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join([str(TOP), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops/paged_stash_kernels.py"],
        env={**environment, "PYTHONPATH": paths},
        cwd=TOP,
        capture_output=True,
        text=True,
        timeout=patience(),
    )
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_without_a_stash(backend, dtype):
    step = Step(dtype)
    stash = PagedStash(100, overflow="raise", backend=backend)
    for valid in (prefix(0), prefix(700), prefix(ROWS), step.numbers % 3 > 0):
        assert_same(step.gradients(stash, valid), step.gradients(None, valid))
        stash.check()
    assert stash.statistics().stashed >= 12
    assert_all_free(stash)


@pytest.mark.parametrize("overflow", ["keep", "raise"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_host_waits_for_nothing(backend, overflow):
    step = Step()
    stash = PagedStash(100, overflow=overflow, backend=backend)
    for valid in (prefix(700), step.numbers % 3 > 0):
        step.gradients(stash, valid)  # makes pools and compiles kernels
        with no_waiting():
            step.gradients(stash, valid)
    assert stash.statistics().stashed >= 12


def test_a_graph_is_replayed_with_other_counts_and_leaves_all_pages_free():
    step, count = Step(), prefix(700)
    stash = PagedStash(4 * 13, overflow="raise", backend="triton")
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step.gradients(stash, count)
    torch.cuda.current_stream().wait_stream(aside)
    # x has rows of WIDTH, the other four have 2 * WIDTH: enough for 800 rows, and too few for all.
    stash.resize_all()
    stash.resize(lambda pool: (13 if pool.width == WIDTH else 4 * 13, 0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step.gradients(stash, count)
    stash.check()
    for rows in (700, 0, 800, 1, 64, 799):
        count.fill_(rows)
        with torch.no_grad():
            step.x.normal_()
        expected = step.gradients(None, count)
        graph.replay()
        assert_same(captured, expected)
        stash.check()
        assert_all_free(stash)
    count.fill_(ROWS)
    graph.replay()
    with pytest.raises(StashOverflowError):
        stash.check()
    assert_all_free(stash)
    count.fill_(800)
    expected = step.gradients(None, count)
    graph.replay()
    assert_same(captured, expected)
    stash.check()


def test_what_does_not_fit_goes_to_pinned_memory():
    step = Step()
    stash = PagedStash(12, host_pages=100, overflow="spill", backend="triton")
    for valid in (prefix(700), prefix(ROWS), step.numbers % 3 > 0):
        expected = step.gradients(None, valid)
        step.gradients(stash, valid)
        with no_waiting():
            ours = step.gradients(stash, valid)
        assert_same(ours, expected)
        stash.check()
    statistics = stash.statistics()
    assert statistics.stashed and statistics.spilled and not statistics.lost
    assert all(pool.host_data.is_pinned() for pool in stash.pools.values())
    assert_all_free(stash)


@pytest.mark.parametrize("overflow", ["keep", "raise"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_memory_of_originals_is_free_between_forward_and_backward(backend, overflow):
    step, valid = Step(rows=64 * ROWS), prefix(ROWS)
    stash = PagedStash(100, overflow=overflow, backend=backend)

    def held_after_forward(stash):
        step.gradients(stash, valid)  # makes pools, and what cuBLAS wants for itself
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        output = step.forward(stash, valid)
        torch.cuda.synchronize()
        if stash is not None:
            stash.settle()
        held = torch.cuda.memory_allocated() - before
        del output
        return held

    # The output is a ninth: the upper layer's is four times its size, those of silu and of the product twice.
    assert held_after_forward(stash) < held_after_forward(None) / 4
    assert_all_free(stash)


@pytest.mark.parametrize("backend", BACKENDS)
def test_streams_share_a_pool(backend):
    steps = [Step(), Step()]
    stash = PagedStash(100, overflow="raise", backend=backend)
    counts = [prefix(700), prefix(300)]
    expected = [step.gradients(None, count) for step, count in zip(steps, counts)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for turn in range(20):
        outputs, ours = [], [None, None]
        for stream, step, count in zip(streams, steps, counts):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outputs.append(step.forward(stash, count))
        for which in (0, 1) if turn % 2 else (1, 0):
            with torch.cuda.stream(streams[which]):
                ours[which] = steps[which].backward(outputs[which], counts[which])
        torch.cuda.synchronize()
        for one, other in zip(ours, expected):
            assert_same(one, other)
    stash.check()
    assert_all_free(stash)


def test_offsets_beyond_31_bits():
    from shim.ops import _stash_triton
    from shim.ops._stash_pool import PagePool
    from shim.ops._stash_rows import valid_rows

    rows, width = 6, 1 << 29
    if torch.cuda.mem_get_info()[0] < 10 << 30:
        pytest.skip("less than 10 GiB of memory are free")
    device = torch.device("cuda", torch.cuda.current_device())
    pool = PagePool(torch.uint8, width, 1, rows, 0, device, _stash_triton)
    tensor = torch.empty(rows, width, dtype=torch.uint8, device=device)
    for odd in (0, 1):  # words of eight bytes, and of one
        view = tensor.flatten()[odd : odd + rows * width - width].view(rows - 1, width)
        for row in range(rows - 1):
            view[row].fill_(row + 1)
        valid = valid_rows(rows - 1, None, device)
        pages, where = torch.empty(rows - 1, dtype=torch.int64, device=device), torch.zeros_like(valid.count)
        pool.store(view, valid, pages, where, expected=1, kept=False)
        tensor.zero_()
        pool.load(view, valid, pages, where)
        for row in range(rows - 1):
            assert (view[row].amin().item(), view[row].amax().item()) == (row + 1, row + 1)
        pool.give_back(valid, pages, where, 1, False)
