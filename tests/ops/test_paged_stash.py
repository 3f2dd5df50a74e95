"""The paged stash: weights, too few pages, memory, statistics, and errors."""

import contextlib
import gc
import logging
import re
import threading

import pytest

torch = pytest.importorskip("torch")

from stash_cases import (  # noqa: E402
    ANY_STASH,
    BOTH,
    HIDDEN,
    ROWS,
    VALID,
    Batch,
    Expert,
    Glu,
    Save,
    ample,
    assert_nothing_lives,
    assert_same,
    gradients,
    mask_of,
    noted_records,
    pages_for,
    run,
)
from torch.autograd.graph import save_on_cpu  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from shim.ops.paged_stash import PagedStash, StashOverflowError  # noqa: E402

# Weights


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


# Too few pages


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


# Nothing is read on the host


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


# Memory


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


# Statistics


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
    ("empty|its source is not known", torch.ones(ROWS, 0)),
    ("its source is not known", torch.ones(ROWS + 1, 8)),
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
        assert len(caplog.records) == 2 and "foreign hooks" in caplog.records[1].getMessage()


def test_no_warning_where_something_was_stashed_or_there_was_nothing(caplog):
    stash, wide = ample(), torch.ones(ROWS, 8, requires_grad=True)
    with caplog.at_level(logging.WARNING, logger="shim"):
        stash.check()
        stash.run(lambda x: (x[:, :2].sin(), x.sin()), wide, rows=ROWS)
        assert stash.skipped
        stash.check()
    assert not caplog.records


# Errors


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
        (torch.ones(5, dtype=torch.int64), "each equal segment"),
        (torch.ones(2, 2, dtype=torch.int64), "each equal segment"),
        (torch.ones(0, dtype=torch.int64), "each equal segment"),
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
