"""The paged stash: its pages under any history of forward and backward passes."""

import contextlib
import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, Phase, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule  # noqa: E402
from stash_cases import (  # noqa: E402
    Save,
    assert_nothing_lives,
    mask_of,
    noted_records,
    pages_for,
)

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
from shim.ops.paged_stash import PagedStash, StashOverflowError  # noqa: E402


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
