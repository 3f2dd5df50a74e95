"""The paged stash: its pages under any history, and the gradients, bit for bit, with and without it."""

import contextlib
import gc
import logging
import re
import threading
import weakref
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, Phase, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule  # noqa: E402
from torch.autograd.graph import save_on_cpu  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.nn.functional import silu  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from shim.ops._stash_eager import (  # noqa: E402
    HEAD,
    HOST_HEAD,
    HOST_TAIL,
    IN_POOL,
    NOWHERE,
    ON_HOST,
    TAIL,
    WANTED,
)
from shim.ops._stashed_tensor import StashedTensor  # noqa: E402
from shim.ops.paged_stash import PagedStash, StashOverflowError  # noqa: E402

ROWS, HIDDEN, INNER = 24, 12, 8
SEES_HOOKS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")  # older torch unpacks what a checkpoint has


@contextlib.contextmanager
def noted_records():
    """All StashedTensors that are made meanwhile and live."""
    records, init = weakref.WeakSet(), StashedTensor.__init__

    def noting(self, *args, **keywords):
        init(self, *args, **keywords)
        records.add(self)

    with mock.patch.object(StashedTensor, "__init__", noting):
        yield records


def pages_for(rows, page_size):
    return -(-rows // page_size)


def mask_of(rows, valid):
    """The valid rows by the words of the documentation, bool [rows]."""
    row = torch.arange(rows)
    if valid is None:
        return row >= 0
    if isinstance(valid, int) or (valid.numel() == 1 and valid.dtype != torch.bool):
        return row < int(valid)
    if valid.dtype == torch.bool:
        return valid.clone()
    capacity = rows // len(valid)
    return row % capacity < valid[row // capacity]


def assert_nothing_lives(stash):
    assert stash.live == 0
    assert all(use.wanted == 0 for use in stash.statistics().pools)


# 1. Any history


class Save(torch.autograd.Function):
    """Saves its inputs, the first of them twice; gives out one number."""

    @staticmethod
    def forward(ctx, leaf, *tensors):
        ctx.save_for_backward(*tensors, tensors[0])
        return leaf * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.saved_tensors
        return gradient, *[None] * (len(ctx.needs_input_grad) - 1)


def laid_out(shape, dtype, layout):
    """Distinct values of no particular rows, at strides of many kinds."""
    rows, width = shape
    if layout == "transposed":
        tensor = torch.empty(width, rows).t()
    elif layout == "sliced":
        tensor = torch.empty(rows, 2 * width + 1)[:, width : 2 * width]
    elif layout == "every other":
        tensor = torch.empty(2 * rows, 2 * width)[1::2, ::2]
    elif layout == "3d":
        tensor = torch.empty(rows, 1, width)
    elif layout == "3d transposed":
        tensor = torch.empty(rows, 11, width).transpose(1, 2)  # has no view of [rows, width]
    else:
        tensor = torch.empty(rows, width)
    tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    return tensor.copy_(torch.randint(0, 2, tensor.shape) if dtype == torch.bool else torch.randn(tensor.shape))


class Forward:
    """One forward of the machine: its graph, and what is expected of each tensor in it."""

    def __init__(self, output, saved, records):
        self.output, self.saved, self.records = output, saved, records
        self.released = False


class Expected:
    def __init__(self, tensor, mask, pool, where, kept):
        self.value, self.strides, self.pool, self.kept = tensor.clone(), tensor.stride(), pool, kept
        self.mask = mask.view(-1, *[1] * (tensor.dim() - 1))
        self.where = where
        self.need = pages_for(int(mask.sum()), pool.page_size)


LAYOUTS = ("dense", "transposed", "sliced", "every other", "3d", "3d transposed")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.bool)


def valids(rows):
    kinds = [
        st.none(),
        st.integers(-1, rows + 3),
        st.integers(-1, rows + 3).map(torch.tensor),
        st.lists(st.booleans(), min_size=rows, max_size=rows).map(lambda mask: torch.tensor(mask, dtype=torch.bool)),
    ]
    segments = [n for n in range(2, rows + 1) if rows % n == 0]
    if segments:
        counts = st.sampled_from(segments).flatmap(lambda n: st.lists(st.integers(0, 5), min_size=n, max_size=n))
        kinds.append(counts.map(lambda c: torch.tensor(c, dtype=torch.int32)))
    return st.one_of(kinds)


class Histories(RuleBasedStateMachine):
    @initialize(
        overflow=st.sampled_from(["keep", "spill", "raise"]),
        pages=st.sampled_from([0, 1, 3, 8, 100]),
        host_pages=st.sampled_from([0, 2, 100]),
        page_size=st.integers(1, 4),
    )
    def begin(self, overflow, pages, host_pages, page_size):
        self.stack = contextlib.ExitStack()
        gc.freeze()  # to collect is quick then
        self.stack.callback(gc.unfreeze)
        self.records = self.stack.enter_context(noted_records())
        if overflow == "spill":
            host_pages = max(host_pages, 1)
        self.stash = PagedStash(pages, host_pages=host_pages, page_size=page_size, overflow=overflow)
        self.forwards = []
        self.lost = 0

    def free(self, pool, where, capacity):
        here = [e for f in self.forwards if not f.released for e in f.saved if e.pool is pool and e.where == where]
        return capacity - sum(e.need for e in here)

    def place(self, pool, need):
        if self.free(pool, IN_POOL, pool.pages) >= need:
            return IN_POOL
        if pool.host_pages and self.free(pool, ON_HOST, pool.host_pages) >= need:
            return ON_HOST
        return NOWHERE

    def chosen(self, data):
        usable = [f for f in self.forwards if not f.released]
        return usable[data.draw(st.integers(0, len(usable) - 1))]  # hypothesis holds on to what it draws

    @rule(
        data=st.data(),
        rows=st.integers(1, 9),
        width=st.sampled_from([16, 17]),
        dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
        layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
        fails=st.integers(0, 5).map(lambda n: n == 0),
    )
    def forward(self, data, rows, width, dtypes, layouts, fails):
        valid = data.draw(valids(rows))
        tensors = [laid_out((rows, size), *how) for size, *how in zip((width, width + 3), dtypes, layouts)]
        leaf, before = torch.ones((), requires_grad=True), set(self.records)
        with contextlib.suppress(ZeroDivisionError), self.stash.group(rows, valid, block_of=lambda tensor: 1) as group:
            output = Save.apply(leaf, *tensors)
            if fails:
                1 / 0
        group.commit(output)
        if fails:
            assert set(self.records) == before
            return
        mask, saved = mask_of(rows, valid), []
        for tensor in tensors:
            pool = self.stash.pools[tensor.device, tensor.dtype, tensor.numel() // rows]
            where = self.place(pool, pages_for(int(mask.sum()), pool.page_size))
            kept = where == NOWHERE
            if self.stash.overflow != "keep":  # but a pool without pages has not got its size yet
                kept = not (pool.pages or pool.host_pages)
            saved.append(Expected(tensor, mask, pool, where, kept))
            self.lost += where == NOWHERE and not kept
        new = set(self.records) - before
        assert len(new) == 2, "a tensor saved twice is stashed once"
        self.forwards.append(Forward(output, saved, weakref.WeakSet(new)))

    @rule(rows=st.sampled_from([0, 5]))
    def forward_of_nothing(self, rows):
        before = set(self.records)
        leaf = torch.ones((), requires_grad=True)
        self.stash.run(Save.apply, leaf, torch.ones(rows, 0 if rows else 16), rows=rows)
        assert set(self.records) == before

    @precondition(lambda self: any(not f.released for f in self.forwards))
    @rule(data=st.data())
    def restore(self, data):
        one = self.chosen(data)
        *saved, again = one.output.grad_fn.saved_tensors
        assert torch.equal(again, saved[0])
        for found, expected in zip(saved, one.saved):
            value = expected.value
            if not expected.kept:
                held = expected.mask & (expected.where != NOWHERE)
                value = torch.where(held, value, torch.zeros_like(value))
            assert torch.equal(found, value) and found.dtype == value.dtype and found.shape == value.shape
            assert found.stride() == expected.strides

    @precondition(lambda self: self.forwards)
    @rule(data=st.data(), how=st.sampled_from(["del", "cycle", "backward", "retained"]))
    def drop(self, data, how):
        one = self.forwards.pop(data.draw(st.integers(0, len(self.forwards) - 1)))
        if how == "cycle":
            cycle = [one.output]
            cycle.append(cycle)
            records = one.records
            del one, cycle
            gc.collect()
            assert not records
        elif how != "del" and not one.released:
            if how == "retained":
                one.output.backward(retain_graph=True)
            one.output.backward()
            assert not one.records, "backward gives everything back"

    @precondition(lambda self: any(not f.released for f in self.forwards))
    @rule(data=st.data())
    def release_twice(self, data):
        one = self.chosen(data)
        one.released = True
        for _ in range(2):
            for record in one.records:
                record.release()
        with pytest.raises(RuntimeError, match="given back"):
            one.output.grad_fn.saved_tensors

    @rule()
    def collect(self):
        gc.collect()

    @precondition(lambda self: self.stash.pools)
    @rule(data=st.data(), pages=st.sampled_from([0, 2, 9]), host_pages=st.sampled_from([0, 3]))
    def resize(self, data, pages, host_pages):
        pool = data.draw(st.sampled_from(list(self.stash.pools.values())))
        quiet = not pool.live
        assert pool.allocate_pages(pages, host_pages) is quiet

    @rule()
    def check(self):
        lost, self.lost = self.lost, 0
        with pytest.raises(StashOverflowError) if lost else contextlib.nullcontext():
            self.stash.check()
        self.stash.check()

    @invariant()
    def pages_are_free_or_held_by_one(self):
        for pool in self.stash.pools.values():
            state = pool.state.tolist()
            records = [r for r in self.records if r.pool is pool and r._pages is not None]
            assert pool.live == len(records)
            needs = {r: pages_for(int(r.rows.count), pool.page_size) for r in records}
            assert state[WANTED] == sum(needs.values())
            for where, ring, capacity, head, tail in (
                (IN_POOL, pool.ring, pool.pages, HEAD, TAIL),
                (ON_HOST, pool.host_ring, pool.host_pages, HOST_HEAD, HOST_TAIL),
            ):
                free = [int(ring[place % capacity]) for place in range(state[head], state[tail])]
                held = [page for r in records if r.where == where for page in r._pages[: needs[r]].tolist()]
                assert sorted(free + held) == list(range(capacity))

    def teardown(self):
        self.forwards = []
        self.pages_are_free_or_held_by_one()
        assert not self.records
        assert_nothing_lives(self.stash)
        self.stack.close()


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=120,
    phases=[Phase.generate],  # shrinking takes minutes: add Phase.shrink to look into a failure
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_pages_that_the_backend_gets_back_twice_are_free_once():
    with noted_records() as records:
        stash = PagedStash(8, page_size=4)
        output = stash.run(torch.sin, torch.randn(9, 8, requires_grad=True), rows=9)
        (record,) = records
        pool, count, pages, where = record.pool, record.rows.count, record._pages.clone(), record.where
        record.release()
        state = pool.state.tolist()
        pool.backend.release(pool, count, pages, where)
        assert pool.state.tolist() == state and output is not None
        assert state[TAIL] - state[HEAD] == 8 and state[WANTED] == 0


# 2. Gradients, bit for bit


class Glu(torch.autograd.Function):
    """Gated activation that saves its input and the probabilities, as fused ones do."""

    @staticmethod
    def forward(ctx, x, probs):
        ctx.save_for_backward(x, probs)
        gate, up = x.chunk(2, -1)
        return silu(gate) * up * probs

    @staticmethod
    def backward(ctx, gradient):
        x, probs = ctx.saved_tensors
        with torch.enable_grad():
            x, probs = x.detach().requires_grad_(), probs.detach().requires_grad_()
            gate, up = x.chunk(2, -1)
            return torch.autograd.grad(silu(gate) * up * probs, (x, probs), gradient)


class Expert(torch.nn.Module):
    def __init__(self, dtype=torch.float32, fused=False, inner=INNER, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.up = torch.nn.Linear(HIDDEN, 2 * inner, dtype=dtype)
        self.down = torch.nn.Linear(inner, HIDDEN, bias=False, dtype=dtype)
        self.fused = fused

    def forward(self, x, probs):
        hidden = self.up(x)
        if self.fused:
            return self.down(Glu.apply(hidden, probs))
        gate, up = hidden.chunk(2, -1)
        return self.down(silu(gate) * up * probs)


class Batch:
    """Inputs of an expert, and the gradient of its output; those of rows that are not valid are zeros."""

    def __init__(self, valid=None, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.valid = valid
        self.mask = mask_of(ROWS, valid)[:, None]
        self.x, self.weight = (torch.randn(ROWS, HIDDEN, generator=generator).to(dtype) for _ in range(2))
        self.probs = torch.rand(ROWS, 1, generator=generator).to(dtype)

    def leaves(self):
        return self.x.clone().requires_grad_(), self.probs.clone().requires_grad_()

    def loss(self, output):
        return torch.where(self.mask, output * self.weight, 0).sum()


def run(stash, function, *args, valid=None):
    return function(*args) if stash is None else stash.run(function, *args, rows=ROWS, valid=valid)


def gradients(stash, expert, batch, call=run):
    leaves = batch.leaves()
    output = call(stash, expert, *leaves, valid=batch.valid)
    return torch.autograd.grad(batch.loss(output), [*leaves, *[p for p in expert.parameters() if p.requires_grad]])


def assert_same(found, expected):
    assert len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected))


def ample(**options):
    return PagedStash(1000, page_size=4, overflow="raise", **options)


VALID = {
    "all": None,
    "int": 10,
    "none": torch.tensor(0),
    "more than all": torch.tensor([ROWS + 7]),
    "first": torch.tensor([10], dtype=torch.int32),
    "mask": torch.arange(ROWS) % 3 != 1,
    "segments": torch.tensor([3, 0, 9, 6]),
}
STASHES = {
    "ample": ample,
    "keep, too small": lambda: PagedStash(4, page_size=4),
    "keep, empty": lambda: PagedStash(0, page_size=4),
    "keep, with a host pool": lambda: PagedStash(2, page_size=4, host_pages=3),
    "spill": lambda: PagedStash(3, page_size=4, host_pages=1000, overflow="spill"),
    "spill, no pool": lambda: PagedStash(0, page_size=3, host_pages=1000, overflow="spill"),
}
BOTH = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
SOME = pytest.mark.parametrize("valid", [VALID["first"], VALID["mask"]], ids=["first", "mask"])
ANY_STASH = pytest.mark.parametrize("stash", STASHES.values(), ids=STASHES)


@BOTH
@ANY_STASH
@pytest.mark.parametrize("valid", VALID.values(), ids=VALID)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_have_the_same_bits(dtype, valid, stash, fused):
    expert, batch, stash = Expert(dtype, fused), Batch(valid, dtype), stash()
    assert_same(gradients(stash, expert, batch), gradients(None, expert, batch))
    found = stash.statistics()
    assert found.stashed + found.spilled + found.kept >= 3 and found.lost == 0
    assert_nothing_lives(stash)
    stash.check()


def test_rows_that_are_not_valid_come_back_as_zeros_whatever_was_in_them():
    expert, batch, stash = Expert(), Batch(10), ample()
    garbage = Batch(10)
    garbage.x[10:] = float("nan")
    batch.x[10:] = 0
    found, expected = gradients(stash, expert, garbage), gradients(None, expert, batch)
    assert_same(found[2:], expected[2:])


def test_experts_in_three_dimensions_are_known_by_block_of():
    experts, capacity, valid = 4, ROWS // 4, torch.tensor([3, 0, 9, 6])
    batch, weight = Batch(valid), torch.nn.Parameter(torch.randn(4, HIDDEN, HIDDEN))

    def compute(x):
        x = x.view(experts, capacity, HIDDEN)
        return silu(torch.bmm(x, weight)).flatten(0, 1)

    found = []
    for stash in (None, ample()):
        x, _ = batch.leaves()
        if stash is None:
            output = compute(x)
        else:
            with stash.group(
                ROWS, valid, weights=[weight], block_of=lambda t: 1 if t.shape[:2] == (experts, capacity) else None
            ) as group:
                output = compute(x)
            group.commit(output)
            assert stash.statistics().stashed == 2
        found.append(torch.autograd.grad(batch.loss(output), (x, weight)))
    assert_same(*found)


def test_a_row_for_a_block_of_rows():
    scales, valid = torch.randn(ROWS // 4, 3), torch.tensor(9)
    stash, leaf = ample(), torch.ones((), requires_grad=True)
    with stash.group(ROWS, valid, block_of=lambda t: 4 if t.shape == scales.shape else None) as group:
        output = Save.apply(leaf, scales)
    group.commit(output)
    found, _ = output.grad_fn.saved_tensors
    assert torch.equal(found[:3], scales[:3]) and not found[3:].any()


@pytest.mark.parametrize("block", [5, 48])
def test_blocks_that_do_not_divide_the_rows_stay(block):
    stash, leaf, scales = ample(), torch.ones((), requires_grad=True), torch.randn(5, 4)
    with stash.group(ROWS, 9, block_of=lambda t: block) as group:
        output = Save.apply(leaf, scales)
    group.commit(output)
    assert stash.live == 0 and torch.equal(output.grad_fn.saved_tensors[0], scales)


ORDERS = {
    "all forward, then all backward": "f0 f1 f2 f3 b0 b1 b2 b3",
    "reverse": "f0 f1 f2 f3 b3 b2 b1 b0",
    "1F1B": "f0 f1 b0 f2 b1 f3 b2 b3",
    "one at a time": "f0 b0 f1 b1 f2 b2 f3 b3",
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("stash", [ample, STASHES["keep, too small"], STASHES["spill"]], ids=["ample", "keep", "spill"])
def test_orders_of_a_pipeline(order, stash):
    found = []
    for stash in (None, stash()):
        expert, graphs, results = Expert(), {}, []
        for what, number in order.split():
            batch = Batch(torch.tensor([5 * int(number)]), seed=int(number))
            if what == "f":
                leaves = batch.leaves()
                graphs[number] = leaves, batch.loss(run(stash, expert, *leaves, valid=batch.valid))
            else:
                leaves, loss = graphs.pop(number)
                loss.backward()
                results += [leaf.grad for leaf in leaves]
                del loss
        found.append(results + [p.grad for p in expert.parameters()])
    assert_same(*found)
    assert_nothing_lives(stash)


def test_two_chunks_interleaved():
    order = "f00 f10 f01 f11 b10 f02 b00 b11 f12 b01 b12 b02"  # of chunk, microbatch
    found = []
    for stash in (None, PagedStash(20, page_size=4)):
        chunks, graphs = [Expert(seed=0), Expert(seed=1)], {}
        for what, chunk, number in order.split():
            chunk, number = int(chunk), int(number)
            batch = Batch(torch.arange(ROWS) % 4 != number, seed=number)
            if what == "f":
                x, probs = batch.leaves()
                if chunk == 1:
                    x = graphs[0, number][1].detach().requires_grad_()
                graphs[chunk, number] = x, run(stash, chunks[chunk], x, probs, valid=batch.valid)
            elif chunk == 1:
                batch.loss(graphs[1, number][1]).backward()
            else:
                output = graphs.pop((0, number))[1]
                output.backward(graphs.pop((1, number))[0].grad)
        found.append([p.grad for chunk in chunks for p in chunk.parameters()])
    assert_same(*found)
    assert_nothing_lives(stash)


@SOME
@BOTH
def test_two_backwards_through_a_retained_graph(fused, valid):
    expert, batch, found = Expert(fused=fused), Batch(valid), []
    for stash in (None, ample()):
        leaves = batch.leaves()
        loss = batch.loss(run(stash, expert, *leaves, valid=valid))
        loss.backward(retain_graph=True)
        assert stash is None or stash.live
        loss.backward()
        found.append([leaf.grad for leaf in leaves] + [p.grad for p in expert.parameters()])
        expert.zero_grad()
    assert_same(*found)
    assert_nothing_lives(stash)


@SOME
@ANY_STASH
def test_double_backward(stash, valid):
    expert, batch, found = Expert(dtype=torch.float64), Batch(valid, torch.float64), []
    for stash in (None, stash()):
        leaves = batch.leaves()
        inputs = [*leaves, *expert.parameters()]
        loss = batch.loss(run(stash, expert, *leaves, valid=valid))
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        found.append([*first, *torch.autograd.grad(penalty, inputs)])
        del first, penalty, loss
    assert_same(*found)
    assert_nothing_lives(stash)


def around(hook):
    def call(stash, expert, *leaves, valid):
        return hook(lambda *inputs: run(stash, expert, *inputs, valid=valid), *leaves)

    return call


def inside(hook):
    def call(stash, expert, *leaves, valid):
        def forward(x, probs):
            return hook(expert, x * 2, probs).sin()

        return run(stash, forward, *leaves, valid=valid)

    return call


def saving_on_cpu(function, *args):
    with save_on_cpu():
        return function(*args)


def reentrant(function, *args):
    return checkpoint(function, *args, use_reentrant=True)


def not_reentrant(function, *args):
    return checkpoint(function, *args, use_reentrant=False)


@SOME
@pytest.mark.parametrize("hook", [saving_on_cpu, reentrant, not_reentrant])
@pytest.mark.parametrize("place", [around, inside])
def test_with_hooks_of_somebody_else(place, hook, valid):
    # torch.autograd.grad is nothing for a reentrant checkpoint
    expert, batch, found = Expert(), Batch(valid), []
    for stash in (None, ample()):
        leaves = batch.leaves()
        batch.loss(place(hook)(stash, expert, *leaves, valid=valid)).backward()
        found.append([leaf.grad for leaf in leaves] + [p.grad for p in expert.parameters()])
        expert.zero_grad()
    assert_same(*found)
    assert_nothing_lives(stash)
    stashed = stash.statistics()
    if place is inside:
        assert stashed.stashed >= 1
    else:
        assert stashed.stashed == 0 and (stashed.skipped or hook is reentrant)


@pytest.mark.skipif(not SEES_HOOKS, reason="this torch does not tell which saved tensors have hooks")
@pytest.mark.parametrize("hook", [saving_on_cpu, not_reentrant])
def test_what_has_hooks_is_not_looked_at_in_the_forward(hook):
    forwards, stash = [], ample()

    def body(x):
        forwards.append(1)
        return (x.sin() * x.exp()).sigmoid()

    with stash.group(ROWS) as group:
        output = hook(body, Batch().leaves()[0])
    before = stash.statistics()
    with mock.patch.object(torch.Tensor, "to", side_effect=AssertionError("fetched")):
        group.commit(output)
    assert len(forwards) == 1 and stash.statistics().pools == before.pools


@pytest.mark.skipif(not SEES_HOOKS, reason="this torch does not tell which saved tensors have hooks")
def test_of_nested_groups_the_inner_one_stashes():
    stash, (x, _) = PagedStash(2 * ROWS // 4, page_size=4, overflow="raise"), Batch(10).leaves()
    with stash.group(ROWS, 10) as outer:
        with stash.group(ROWS, 10) as inner:
            output = x.sin().exp()
        inner.commit(output)
        output = output.sin()
    outer.commit(output)
    assert stash.statistics().stashed == 3 and stash.live == 3
    stash.check()
    output[:10].sum().backward()
    expected = x.detach().requires_grad_()
    expected.sin().exp().sin()[:10].sum().backward()
    assert torch.equal(x.grad, expected.grad)
    assert_nothing_lives(stash)


def test_frozen_weights_with_an_adapter():
    class Adapted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.expert = Expert().requires_grad_(False)
            self.a, self.b = torch.nn.Linear(HIDDEN, 4, bias=False), torch.nn.Linear(4, HIDDEN, bias=False)

        def forward(self, x, probs):
            return self.expert(x + self.b(self.a(x)), probs)

    module, batch, stash = Adapted(), Batch(10), ample()
    assert_same(gradients(stash, module, batch), gradients(None, module, batch))
    assert stash.statistics().stashed >= 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_stashed(mode):
    expert, batch, stash = Expert(), Batch(), ample()
    with mode():
        found = stash.run(expert, batch.x, batch.probs, rows=ROWS)
        stash.check()
    assert torch.equal(found, expert(batch.x, batch.probs)) and not stash.pools
    assert_same(gradients(stash, expert, batch), gradients(None, expert, batch))


def test_a_pool_that_was_resized_in_inference_mode():
    stash, expert, batch = ample(), Expert(), Batch()
    gradients(stash, expert, batch)
    with torch.inference_mode():
        for pool in stash.pools.values():
            pool.allocate_pages(500, 0)
    assert_same(gradients(stash, expert, batch), gradients(None, expert, batch))


def test_nests_of_outputs_and_one_that_is_not_connected():
    stash, (x, _) = ample(), Batch(10).leaves()
    with stash.group(ROWS, 10) as group:
        output = {"a": (x.sin(), None, 3), "b": [x.exp(), {"c": torch.ones(3)}]}
    group.commit(output)
    assert stash.live == 2
    (output["a"][0] * output["b"][0])[:10].sum().backward()
    plain = x.detach().requires_grad_()
    (plain.sin() * plain.exp())[:10].sum().backward()
    assert torch.equal(x.grad, plain.grad)
    del output
    assert_nothing_lives(stash)


def test_what_leads_to_no_output_is_left_alone_and_so_is_what_was_before():
    stash, (x, _) = ample(), Batch(10).leaves()
    before = x.exp()
    with stash.group(ROWS, 10) as group:
        other, output = before.sin(), before.cos()
    group.commit(output)
    assert stash.live == 1
    (other.sum() + output[:10].sum() + before.sum()).backward()
    plain = x.detach().requires_grad_()
    exp = plain.exp()
    (exp.sin().sum() + exp.cos()[:10].sum() + exp.sum()).backward()
    assert torch.equal(x.grad, plain.grad)


def test_a_commit_is_for_once_and_not_after_an_exception():
    stash, (x, _) = ample(), Batch().leaves()
    with stash.group(ROWS) as group:
        output = x.exp()
    group.commit(output)
    group.commit(output)
    assert stash.live == 1
    with contextlib.suppress(KeyError), group:
        output = x.exp()
        raise KeyError
    group.commit(output)
    assert stash.live == 0


@pytest.mark.parametrize("function", [torch.exp, lambda x: Save.apply(x.sum(), x * 1)], ids=["C++", "Python"])
def test_a_commit_after_the_backward(function):
    stash, (x, _) = ample(), Batch().leaves()
    with stash.group(ROWS) as group:
        output = function(x)
        output.sum().backward()
    group.commit(output)
    assert_nothing_lives(stash)


def test_threads_with_a_model_each_share_a_stash():
    stash, wrong = PagedStash(20, page_size=4), []

    def work(seed):
        expert = Expert(seed=seed)
        for number in range(15):
            batch = Batch(torch.tensor([(7 * number + seed) % ROWS]), seed=number)
            found, expected = gradients(stash, expert, batch), gradients(None, expert, batch)
            wrong.extend(1 for a, b in zip(found, expected) if not torch.equal(a, b))
        wrong.append(0)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0]
    assert_nothing_lives(stash)


# 3. Weights


class Linear(torch.autograd.Function):
    """Looks at its weight in backward as gradient accumulation does."""

    seen = ()

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        Linear.seen = (weight, getattr(weight, "main_grad", None))
        return gradient @ weight, gradient.t() @ x


def test_a_parameter_is_the_same_object_in_backward():
    stash, weight = ample(), torch.nn.Parameter(torch.randn(ROWS, HIDDEN))
    weight.main_grad = torch.zeros(3)
    stash.run(Linear.apply, Batch().leaves()[0], weight, rows=ROWS, valid=10).sum().backward()
    assert Linear.seen == (weight, weight.main_grad) and Linear.seen[0] is weight
    assert stash.statistics().stashed == 1 and not stash.skipped


WEIGHTS = {
    "itself": lambda weight: weight,
    "a view": lambda weight: weight.view(ROWS, -1),
    "a slice": lambda weight: weight[:, :8],
    "transposed": lambda weight: weight.t().contiguous().t() if weight.shape[0] == ROWS else weight.t(),
    "a copy": lambda weight: weight.clone(),
    "a copy in bf16": lambda weight: weight.bfloat16(),
    "a transposed copy": lambda weight: weight.t().contiguous(),
    "transposed, of a copy": lambda weight: weight.clone().t(),
}


@pytest.mark.parametrize("made", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("shape", [(ROWS, HIDDEN), (HIDDEN, ROWS), (ROWS, ROWS)])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "parameter"])
def test_a_weight_that_looks_like_rows_stays(made, shape, plain):
    if made is WEIGHTS["a view"] and shape[0] != ROWS:
        return  # there is no such view
    weight = torch.randn(shape)
    weight = weight if plain else torch.nn.Parameter(weight)
    with torch.no_grad():
        saved = made(weight)
    stash, leaf = ample(), torch.ones((), requires_grad=True)
    with stash.group(ROWS, 3, weights=[weight]) as group:
        output = Save.apply(leaf, saved)
    group.commit(output)
    assert stash.live == 0 and torch.equal(output.grad_fn.saved_tensors[0], saved)


def test_run_knows_the_weights_of_a_module():
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(ROWS, HIDDEN))

        def forward(self, x):
            return x.bfloat16() @ self.weight.bfloat16().t()

    stash, module, found = ample(), Module(), []
    for one in (None, stash):
        x, _ = Batch(10).leaves()
        output = run(one, module, x, valid=10)
        found.append(torch.autograd.grad(output[:10].float().sum(), [x, module.weight])[:1])
    assert_same(*found)


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as quantized and distributed ones are."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*(a.inner if isinstance(a, Wrapper) else a for a in args), **(kwargs or {}))


@pytest.mark.parametrize(
    "weight", [Wrapper(torch.randn(HIDDEN, HIDDEN)), torch.eye(3).to_sparse()], ids=["wrapper", "sparse"]
)
def test_weights_without_memory_of_their_own(weight):
    stash, (x, _) = ample(), Batch().leaves()
    with stash.group(ROWS, weights=[weight]) as group:
        output = x.exp()
    group.commit(output)
    assert stash.live == 1


# 4. Too few pages


def test_raise_tells_what_was_lost_and_the_remedy_and_begins_anew():
    stash, expert, batch = PagedStash(1, page_size=4, overflow="raise"), Expert(), Batch()
    gradients(stash, expert, batch)
    lost = stash.statistics().lost
    assert lost >= 3 and int(stash.lost()) == lost
    with pytest.raises(StashOverflowError, match=r"1 pages and 0 on the host, wanted \d+.*Remedy.*host pool.*keep"):
        stash.check()
    stash.check()
    assert int(stash.lost()) == 0
    assert_same(gradients(stash, expert, Batch(0)), gradients(None, expert, Batch(0)))
    stash.check()


def test_spill_loses_what_finds_no_place_on_the_host_either():
    stash = PagedStash(1, page_size=4, host_pages=1, overflow="spill")
    gradients(stash, Expert(), Batch())
    with pytest.raises(StashOverflowError):
        stash.check()


def test_a_new_size_does_not_make_lost_tensors_forgotten():
    stash = PagedStash(1, page_size=4, overflow="raise")
    gradients(stash, Expert(), Batch())
    for pool in stash.pools.values():
        pool.allocate_pages(100, 0)
    with pytest.raises(StashOverflowError):
        stash.check()


def test_an_original_that_was_kept_must_not_be_changed_in_place():
    for stash in (None, PagedStash(0)):
        x = torch.randn(ROWS, HIDDEN, requires_grad=True) * 1
        output = run(stash, torch.sin, x)
        x.mul_(2)
        with pytest.raises(
            RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"
        ):
            output.sum().backward()


def test_what_was_changed_in_place_before_the_commit_is_left_to_autograd():
    stash = PagedStash(100)
    x = torch.randn(ROWS, HIDDEN, requires_grad=True) * 1
    with stash.group(ROWS) as group:
        output = x.sin()
        x.mul_(2)
    group.commit(output)
    assert stash.live == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# 5. Nothing is read on the host


class Operations(TorchDispatchMode):
    """Fails at what has a GPU's host wait: reading a number, and results whose shape depends on values."""

    WAIT = ("local_scalar_dense", "item", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "bincount")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        name = function.overloadpacket.__name__.strip("_")
        assert not name.startswith(self.WAIT) or name == "index_put", name
        masks = [a for a in args[1:2] if isinstance(a, (list, tuple)) and name.startswith("index")]
        assert not any(t is not None and t.dtype == torch.bool for mask in masks for t in mask), "a mask as an index"
        assert name not in ("repeat_interleave", "split_with_sizes_copy"), name
        return function(*args, **(kwargs or {}))


@ANY_STASH
@BOTH
@pytest.mark.parametrize("valid", VALID.values(), ids=VALID)
def test_the_host_reads_nothing(valid, fused, stash):
    expert, batch, stash = Expert(fused=fused), Batch(valid), stash()
    leaves = batch.leaves()
    with Operations() as operations:
        batch.loss(run(stash, expert, *leaves, valid=valid)).backward()
    assert operations.count > 30
    assert_nothing_lives(stash)


def test_the_test_for_what_the_host_reads():
    ones = torch.ones(3)
    for reads in (lambda: int(ones[0]), lambda: bool(ones.any()), lambda: ones.nonzero(), lambda: ones[ones > 0]):
        with pytest.raises(AssertionError), Operations():
            reads()


# 6. Memory


@pytest.mark.parametrize("overflow", ["keep", "raise"])
def test_originals_are_free_after_the_commit(overflow):
    stash, (x, _), memory = PagedStash(100, page_size=4, overflow=overflow), Batch(10).leaves(), []

    def function(x):
        for _ in range(3):
            x = x.sin()
            memory.append(StorageWeakRef(x.untyped_storage()))
        return Glu.apply(x, torch.ones(ROWS, 1))

    with stash.group(ROWS, 10, inputs=[x]) as group:
        output = function(x)
    assert not any(one.expired() for one in memory)
    group.commit(output)
    assert all(one.expired() for one in memory) and output.grad_fn is not None
    assert stash.live == 4


@pytest.mark.parametrize("saves", [torch.sin, torch.exp], ids=["its input", "its output"])
def test_an_original_that_is_kept_lives_as_long_as_the_graph(saves):
    stash, memory = PagedStash(0), []

    def function(x):
        x = saves(x)
        memory.append(StorageWeakRef(x.untyped_storage()))
        return saves(x)

    output = stash.run(function, Batch().leaves()[0], rows=ROWS)
    assert not memory[0].expired()
    del output
    assert memory[0].expired()


@pytest.mark.parametrize("page_size", [1, 4, 7, 64])
@pytest.mark.parametrize("valid", VALID.values(), ids=VALID)
def test_pages_are_as_many_as_the_valid_rows_need(valid, page_size):
    stash, (x, _) = PagedStash(1000, page_size=page_size), Batch().leaves()
    output = stash.run(lambda x: x.sin().sin(), x, rows=ROWS, valid=valid)
    (use,) = stash.statistics().pools
    assert use.wanted == 2 * pages_for(int(mask_of(ROWS, valid).sum()), page_size)
    assert use.nbytes - 1000 * page_size * HIDDEN * 4 < 2 * HIDDEN * 4 + (1000 + 50) * 8
    output.sum().backward()
    assert_nothing_lives(stash)


def test_without_the_collector_pages_come_back_at_once_and_nothing_grows():
    stash, expert = PagedStash(20, page_size=4), Expert(fused=True)
    gc.collect()
    gc.disable()
    try:
        with noted_records() as records:
            for number in range(300):
                leaves = Batch(torch.tensor([number % ROWS])).leaves()
                output = run(stash, expert, *leaves, valid=number % ROWS)
                assert len(records) == stash.live == 3
                if number % 2:
                    output.sum().backward()
                else:
                    del output
                assert not records and stash.live == 0
    finally:
        gc.enable()
    assert not stash._unsettled and len(stash.pools) == 3
    assert_nothing_lives(stash)


def test_pools_are_cleared_when_nothing_lives_in_them():
    stash, expert, batch = ample(), Expert(), Batch(10)
    leaves = batch.leaves()
    loss = batch.loss(run(stash, expert, *leaves, valid=10))
    sizes = [pool.pages for pool in stash.statistics().pools]
    stash.clear()
    assert [pool.pages for pool in stash.statistics().pools] == sizes != []
    found = torch.autograd.grad(loss, [*leaves, *expert.parameters()])
    assert_same(found, gradients(None, expert, batch))
    stash.clear()
    assert [pool.pages for pool in stash.statistics().pools] == [0] * len(sizes)
    assert_same(gradients(stash, expert, batch), found)


class GroupedProduct(torch.autograd.Function):
    """A product for each expert, which saves the rows of each, as Transformer Engine's does."""

    @staticmethod
    def forward(ctx, x, *weights):
        parts = x.split(len(x) // len(weights))
        ctx.save_for_backward(*parts, *weights)
        return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])

    @staticmethod
    def backward(ctx, grad):
        half = len(ctx.saved_tensors) // 2
        parts, weights = ctx.saved_tensors[:half], ctx.saved_tensors[half:]
        grads = grad.split(len(parts[0]))
        of_weights = [part.T @ of_part for part, of_part in zip(parts, grads, strict=True)]
        return torch.cat([g @ w.T for g, w in zip(grads, weights, strict=True)]), *of_weights


@pytest.mark.parametrize(
    "valid", [torch.tensor(10), torch.tensor([3, 0, 7]), torch.arange(21) % 5 < 2], ids=["prefix", "segments", "mask"]
)
def test_rows_of_one_memory_that_are_saved_in_parts(valid):
    """Each with its own valid rows; together they are the memory."""
    mask = valid if valid.dtype == torch.bool else torch.arange(21) < 10
    if valid.numel() == 3:
        mask = (torch.arange(7) < valid[:, None]).flatten()
    weights = [torch.randn(6, 5, requires_grad=True) for _ in range(3)]
    x = torch.randn(21, 6, requires_grad=True)
    found = []
    for stash in PagedStash(50, page_size=2), None:
        with stash.group(21, valid, inputs=[x]) if stash else contextlib.nullcontext() as group:
            output = GroupedProduct.apply(x * 2, *weights)
        if stash is not None:
            group.commit(output)
            assert stash.statistics().stashed == 3
        found.append(torch.autograd.grad((output * mask[:, None]).square().sum(), [x, *weights]))
    assert_same(*found)


def test_what_a_backward_divides_by_stays():
    """Else rows that are not valid would be 0 / 0, in the gradient of a weight that all rows have a part in."""
    w, x = torch.randn(HIDDEN, HIDDEN, requires_grad=True), torch.randn(ROWS, HIDDEN, requires_grad=True)
    mask = (torch.arange(ROWS) < 5)[:, None]
    found = []
    for stash in ample(), None:
        output = run(stash, lambda x: (x @ w) / ((x @ w).abs() + 1), x, valid=5)
        found.append(torch.autograd.grad((output * mask).sum(), [x, w]))
    assert_same(*found)


def test_a_square_tensor_could_be_transposed():
    stash, x = ample(), torch.randn(ROWS, ROWS, requires_grad=True)
    output = stash.run(lambda x: (x.t().contiguous().square()).t(), x, rows=ROWS, valid=5)
    (found,) = torch.autograd.grad((output * (torch.arange(ROWS) < 5)[:, None]).sum(), [x])
    assert torch.equal(found[:5], 2 * x[:5]) and stash.statistics().stashed == 0


def test_what_another_thread_has_made_before_stays():
    """Nodes are numbered in each thread on their own."""
    stash, made = ample(), []

    def make():
        x = torch.randn(ROWS, HIDDEN, requires_grad=True)
        for _ in range(2000):
            x = x + 0
        made.append(x.exp())

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    stash.run(torch.sin, made[0], rows=ROWS, valid=5)
    assert stash.statistics().stashed == 1


# 7. Statistics


def test_statistics_count_what_became_of_each():
    stash = PagedStash(3, page_size=8, host_pages=3)
    outputs = [stash.run(torch.sin, Batch(seed=n).leaves()[0], rows=ROWS) for n in range(3)]
    found = stash.statistics()
    assert (found.stashed, found.spilled, found.kept, found.lost) == (1, 1, 1, 0)
    (use,) = found.pools
    assert (use.dtype, use.width, use.page_size, use.pages, use.host_pages) == (torch.float32, HIDDEN, 8, 3, 3)
    assert use.wanted == use.most_wanted == 9 and use.nbytes > use.host_nbytes == (3 * 8 + 2) * HIDDEN * 4
    del outputs
    found = stash.statistics()
    assert found.pools[0].wanted == 0 and found.pools[0].most_wanted == 9 and found.stashed == 1


SKIPPED = [
    ("empty|nobody knows from what", torch.ones(ROWS, 0)),
    ("nobody knows from what", torch.ones(ROWS + 1, 8)),
    ("complex64", torch.ones(ROWS, 8, dtype=torch.complex64)),
    ("less than 16 bytes", torch.ones(ROWS, 3)),
    ("layout", torch.eye(ROWS).to_sparse()),
    ("it is a Wrapper", Wrapper(torch.ones(ROWS, 8))),
    ("on meta", torch.ones(ROWS, 8, device="meta")),
    ("stored negated", torch._neg_view(torch.ones(ROWS, 8))),
    ("share memory", torch.ones(ROWS, 1).expand(ROWS, 8)),
    ("share memory", torch.ones(8).expand(ROWS, 8)),
    ("share memory", torch.arange(200.0).as_strided((ROWS, 8), (4, 1))),
]


@pytest.mark.parametrize("reason,tensor", SKIPPED, ids=lambda one: one if isinstance(one, str) else "")
def test_what_cannot_be_stashed_stays_with_its_reason(reason, tensor):
    stash, leaf = ample(), torch.ones(ROWS, 1, requires_grad=True)
    with noted_records() as records:
        output = stash.run(Save.apply, leaf, tensor, rows=ROWS, valid=3)
        assert not records and stash.live == 0
    (found,) = stash.statistics().skipped
    assert re.search(reason, found) and stash.skipped[found] == 2
    back = output.grad_fn.saved_tensors[0]
    assert back.layout != torch.strided or back.is_meta or torch.equal(back.neg(), tensor.neg())


def test_memory_that_was_given_up_stays_given_up():
    stash, leaf, tensor = ample(), torch.ones((), requires_grad=True), torch.ones(ROWS, 8)
    with stash.group(ROWS) as group:
        output = Save.apply(leaf, tensor)
        tensor.untyped_storage().resize_(0)
        del tensor  # to show it, if the test fails, is the end of the process
    group.commit(output)
    assert stash.live == 0 and "given up" in next(iter(stash.skipped))


def test_saved_tensors_that_may_be_read_but_once():
    class Once(torch.autograd.Function):
        clear_saved_tensors_on_access = True

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 2 * x * gradient

    x, _ = Batch().leaves()
    ample().run(Once.apply, x, rows=ROWS).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_nothing_stashed_is_one_warning_with_its_reason(caplog):
    stash = ample()
    with caplog.at_level(logging.WARNING, logger="shim"):
        for _ in range(3):
            stash.run(torch.sin, torch.ones(ROWS, 2, requires_grad=True), rows=ROWS)
            stash.check()
            stash.warn_if_idle()
        (record,) = caplog.records
        assert record.name == "shim" and record.levelno == logging.WARNING and "16 bytes" in record.getMessage()
        with save_on_cpu():
            stash.run(torch.sin, torch.ones(ROWS, 2, requires_grad=True), rows=ROWS)
        stash.check()
        stash.check()
        assert len(caplog.records) == 2 and "hooks of somebody else" in caplog.records[1].getMessage()


def test_no_warning_where_something_was_stashed_or_there_was_nothing(caplog):
    stash, wide = ample(), torch.ones(ROWS, 8, requires_grad=True)
    with caplog.at_level(logging.WARNING, logger="shim"):
        stash.check()
        stash.run(lambda x: (x[:, :2].sin(), x.sin()), wide, rows=ROWS)
        assert stash.skipped
        stash.check()
    assert not caplog.records


# 8. Errors


@pytest.mark.parametrize(
    "options,message",
    [
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": -4}, "page_size is -4"),
        ({"overflow": "drop"}, "'drop'.*keep, spill, raise"),
        ({"overflow": "spill"}, "needs host_pages"),
    ],
)
def test_sizes_and_policies_that_are_not_possible(options, message):
    with pytest.raises(ValueError, match=message):
        PagedStash(4, **options)


@pytest.mark.parametrize(
    "valid,message",
    [
        (torch.ones(ROWS - 1, dtype=torch.bool), "mask"),
        (torch.ones(ROWS, 1, dtype=torch.bool), "mask"),
        (torch.tensor(True), "mask"),
        (torch.ones(5, dtype=torch.int64), "equal segments"),
        (torch.ones(2, 2, dtype=torch.int64), "equal segments"),
        (torch.ones(0, dtype=torch.int64), "equal segments"),
    ],
)
def test_valid_rows_that_do_not_fit(valid, message):
    stash, (x, _) = ample(), Batch().leaves()
    with pytest.raises(ValueError, match=message):
        stash.run(torch.sin, x, rows=ROWS, valid=valid)
    assert stash.live == 0
    assert stash.run(torch.sin, x, rows=ROWS) is not None


def test_an_unknown_backend():
    with pytest.raises(ValueError, match="backend"):
        PagedStash(4, backend="numpy").run(torch.sin, Batch().leaves()[0], rows=ROWS)
