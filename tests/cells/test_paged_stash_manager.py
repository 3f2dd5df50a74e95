"""paged-stash: where the manager of stock fails or is silently wrong, and that gradients are those without a stash.

Stock records the schedule in the first iteration, which stashes nothing; buffers and stashes are there from the second.
"""

import copy
import inspect
import subprocess
import sys
import textwrap
from importlib import import_module

import pytest
import torch
from thorough import in_full, times

import shim
from shim.testing.patience import patience

CELLS = {"0.18.2": "all"}

stash = pytest.importorskip("megatron.core.transformer.moe.paged_stash", reason="the paged stash came with 0.18")

import paged_stash_cases as cases  # noqa: E402
from paged_stash_cases import build, equal_bits, settings, train  # noqa: E402

ID = "paged-stash"
# Chunks, microbatches in flight.
ORDERS = {"all forward": (1, 4), "1F1B": (1, 2), "interleaved": (2, 2)}
# Half of what one iteration takes: the first stash fits, the next does not.
TOO_SMALL = settings(factor=-0.5)


@pytest.fixture(autouse=True)
def fresh(on_cpu, monkeypatch):
    """A manager of its own for each test."""
    monkeypatch.setattr(stash.PagedStashManager, "STASH_MGR", None)
    with cases.interpreted_kernels(), cases.unwritten_memory_is_nan():
        yield


@pytest.fixture
def applied():
    """The patch; what it counted."""
    with shim.patched(only=[ID], require=[ID]) as report:
        assert report[ID].state == "applied", str(report)
        yield import_module("shim.patches.megatron_core.paged_stash").statistics


@pytest.fixture(params=["stock", "shim"])
def stashed(request):
    """Without and with the patch; how much is stashed."""
    if request.param == "stock":
        return pages_taken
    statistics = request.getfixturevalue("applied")
    return lambda: statistics().stashed


def right(model, counts, **options):
    """Whether an iteration has the gradients that it has without a stash."""
    return equal_bits(train(model, counts, **options), train(model, counts, stash=False))


def buffers():
    """Stock's, of which there are none before the second iteration."""
    manager = stash.PagedStashManager.get_instance()
    return [buffer for of_dtype in manager.stash_buffers.values() for buffer in of_dtype.values()]


def pages_taken():
    """By stock, in this iteration so far."""
    return sum(int(buffer.free_list_head.sum()) for buffer in buffers())


def overflowed():
    flag = stash.check_paged_stash_overflow()
    assert flag.dtype == torch.bool and flag.numel() == 1
    return bool(flag)


@pytest.mark.parametrize("order", times(["interleaved"], ORDERS))
def test_where_stock_is_right_gradients_are_those_without_a_stash(stashed, order):
    """The same number of microbatches in each iteration, all of them in the buffer."""
    chunks, in_flight = ORDERS[order]
    model = build(chunks)
    for counts in (5, 3, 8, 1), (5, 3, 8, 1), (1, 4, 6, 7):
        assert right(model, counts, in_flight=in_flight)
        assert not overflowed()
    assert stashed() > 0


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_stock_fails_after_an_evaluation_before_the_first_step(grad):
    """Microbatches of the evaluation are counted on when the schedule is recorded."""
    model = build()
    with torch.set_grad_enabled(grad):
        cases.evaluate(model, (5, 3))
    assert right(model, (5, 3))
    with pytest.raises(AssertionError, match="schedule"):
        train(model, (5, 3))


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_evaluation_at_any_time(applied, grad):
    model = build()
    for _ in range(3):
        with torch.set_grad_enabled(grad):
            cases.evaluate(model, (5, 3, 4))
        assert right(model, (5, 3))
    assert applied().stashed > 0


FEWER_AND_MORE = pytest.mark.parametrize("counts", [(5, 3), (5, 3, 4, 2)], ids=["fewer", "more"])


@FEWER_AND_MORE
def test_stock_fails_when_the_number_of_microbatches_changes(counts):
    model = build()
    assert right(model, (5, 3, 4))
    with pytest.raises(AssertionError, match="schedule"):
        train(model, counts)


@FEWER_AND_MORE
def test_the_number_of_microbatches_may_change(applied, counts):
    model = build()
    assert right(model, (5, 3, 4)) and right(model, (5, 3, 4))
    before = applied().stashed
    assert right(model, counts)
    assert applied().stashed > before


class ExpertsFailed(RuntimeError):
    """Raised by the experts of a test."""


def fail_once(model, monkeypatch, where):
    """Two iterations, and a third that ends in the second layer: amid its experts, or behind them."""
    assert right(model, (5, 3)) and right(model, (5, 3))
    layer = model[0].layers[1]
    name = {"amid": "run", "behind": "forward"}[where]
    original = getattr(layer, name)

    def failing(*args):
        original(*args)
        raise ExpertsFailed

    with monkeypatch.context() as undo:
        undo.setattr(layer, name, failing)
        with pytest.raises(ExpertsFailed):
            train(model, (5, 3))


@pytest.mark.parametrize("where", ["amid", "behind"])
def test_stock_fails_ever_after_an_exception(monkeypatch, where):
    model = build()
    fail_once(model, monkeypatch, where)
    for _ in range(2):
        with pytest.raises(AssertionError, match="is not empty"):
            train(model, (5, 3))


@pytest.mark.parametrize("where", ["amid", "behind"])
def test_training_goes_on_after_an_exception(applied, monkeypatch, where):
    model = build()
    fail_once(model, monkeypatch, where)
    before = applied().stashed
    assert right(model, (5, 3)) and right(model, (3, 5))
    assert applied().stashed > before


def test_stock_overflows_into_gradients_that_nobody_wrote():
    """Where no PagedStashRunner asks, nothing tells."""
    model, counts = build(), (5, 5, 5)
    assert right(model, counts, config=TOO_SMALL)
    found = train(model, counts, config=TOO_SMALL)
    assert not all(grad.isfinite().all() for grad in found.values())
    assert overflowed()


def test_what_does_not_fit_is_kept(applied):
    model, counts = build(), (5, 5, 5)
    for _ in range(3):
        assert right(model, counts, config=TOO_SMALL)
        assert not overflowed()
    assert applied().stashed > 0 and applied().kept > 0


def test_stock_stashes_nothing_without_marks():
    """Gradients are right, memory is as if there were no stash, and nothing tells."""
    model = build(marked=False)
    for _ in range(3):
        assert right(model, (5, 3, 4))
    assert buffers() == [] and not overflowed()


def test_activations_without_marks_are_stashed(applied):
    """But not the weights, though one of them has as many rows."""
    model = build(marked=False)
    for _ in range(3):
        assert right(model, (5, 3, 4))
    assert applied().stashed > 0


# Of three chunks the first two are stashed and the third is next in backward. There is room for the first.
ROOM_FOR_ONE = {"in_flight": 1, "config": TOO_SMALL}


def test_stock_loses_earlier_stashes_to_an_overflow():
    """And their pages, until the next iteration."""
    model, counts = build(chunks=3, layers=1), (5,)
    assert right(model, counts, **ROOM_FOR_ONE)
    found = train(model, counts, **ROOM_FOR_ONE)
    assert [bool(found[f"{chunk}.layers.0.w1"].isfinite().all()) for chunk in range(3)] == [False, False, True]
    assert [int(buffer.free_list_tail[0] - buffer.free_list_head[0]) for buffer in buffers()] == [0, 0]
    assert [buffer.num_cuda_pages for buffer in buffers()] == [2, 2]


def test_earlier_stashes_outlive_an_overflow(applied):
    model, counts = build(chunks=3, layers=1), (5,)
    for _ in range(3):
        assert right(model, counts, **ROOM_FOR_ONE)
    assert applied().stashed > 0 and applied().kept > 0


def test_stock_overflows_on_what_it_was_sized_for():
    """15 tokens take 4 pages of 4, but 3 times 5 tokens take 6."""
    model, counts, exact = build(layers=1), (5, 5, 5), {"in_flight": 3, "config": settings(factor=-1.0)}
    assert right(model, counts, **exact)
    train(model, counts, **exact)
    assert [buffer.num_cuda_pages for buffer in buffers()] == [4, 4]
    assert overflowed()


def test_buffers_are_sized_in_pages(applied):
    model, counts, exact = build(layers=1), (5, 5, 5), {"in_flight": 3, "config": settings(factor=-1.0)}
    assert right(model, counts, **exact)
    kept, stashed = applied().kept, applied().stashed
    assert right(model, counts, **exact)
    assert applied().kept == kept and applied().stashed > stashed


def test_stock_counts_to_999_microbatches():
    with pytest.raises(AssertionError, match="Schedule encoding overflow"):
        train(build(layers=1), [1] * 1000)


def test_stock_mixes_up_microbatches_under_python_o():
    namespace = {}
    source = textwrap.dedent(inspect.getsource(stash.PagedStashManager.get_schedule_layer))
    exec(compile(source, "as python -O compiles it", "exec", optimize=1), namespace)
    key = namespace["get_schedule_layer"]
    assert key(None, vp_stage=1, layer_no=1, microbatch_no=1001) == key(None, vp_stage=1, layer_no=2, microbatch_no=1)


def test_a_thousand_microbatches(applied):
    """A hundred in `make test`."""
    model = build(layers=1)
    turns = times(50, 500)
    assert right(model, [1, 2]) and right(model, [1, 2] * turns)
    assert applied().stashed >= 2 * turns


def flags_of_two_tries():
    """moe_paged_stash of the root's config and of a layer's own, in both tries and after them."""
    root = settings()
    of_layer = copy.copy(root)

    def flags():
        return root.moe_paged_stash, of_layer.moe_paged_stash

    return [*cases.run_twice(flags, root, of_layer), flags()]


# From 0.20, by pull request 6419.
ASKS_EACH_LAYER = "saved_moe_paged_stash_values" in stash.PagedStashRunner.__call__.__code__.co_varnames


def test_stock_reruns_with_the_stash_of_a_layer_that_has_its_own_config(one_rank):
    assert flags_of_two_tries() == [(True, True), (False, not ASKS_EACH_LAYER), (True, True)]


def test_the_rerun_is_without_stash_in_every_layer(one_rank, applied):
    """Also in one whose own config still asks for it; the next step has one again."""
    model, root = build(), settings()
    of_layer = copy.copy(root)

    def newly_stashed():
        before = applied().stashed
        assert right(model, (5, 3), config=of_layer)
        return applied().stashed - before

    newly_stashed()
    first, rerun = cases.run_twice(newly_stashed, root, of_layer)
    assert first > 0 and rerun == 0 and newly_stashed() > 0


def numbers_of_two_tries():
    """Random numbers of both tries, from the default generator and from megatron's tracker."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    def draw():
        with get_cuda_rng_tracker().fork():
            forked = torch.rand(4)
        return torch.rand(4), forked

    root = settings()
    (first, first_forked), (second, second_forked) = cases.run_twice(draw, root, root)
    return torch.equal(first, second), torch.equal(first_forked, second_forked)


def test_stock_reruns_with_other_random_numbers(one_rank):
    assert numbers_of_two_tries() == (False, False)


def test_the_rerun_draws_the_same_random_numbers(one_rank, applied):
    assert numbers_of_two_tries() == (True, True)


def skip_a_layer(model):
    """In the third iteration."""
    assert right(model, (5, 3)) and right(model, (5, 3))
    model[0].layers = model[0].layers[:1]
    return right(model, (5, 3))


def test_stock_fails_when_a_layer_is_skipped():
    with pytest.raises(AssertionError, match="schedule"):
        skip_a_layer(build())


def test_a_layer_may_be_skipped(applied):
    assert skip_a_layer(build())


def use_partly(model):
    """The experts alone, as where only they are captured: nobody has told the stash of chunks and microbatches."""
    stash.paged_stash_reset(enabled=True, config=settings())
    for _ in range(3):
        model.zero_grad()
        model[0](0, 5, True).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def test_stock_fails_when_only_the_experts_use_it():
    with pytest.raises(AssertionError):
        use_partly(build())


def test_only_the_experts_may_use_it(applied):
    model = build()
    assert equal_bits(use_partly(model), train(model, (5,), stash=False))
    assert applied().stashed > 0


WITHOUT_TRITON = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTriton())
try:
    import megatron.core.pipeline_parallel.schedules
except ModuleNotFoundError as error:
    print("stock:", error.name)
import shim
shim.apply(only=["paged-stash"])
import megatron.core.models.gpt.gpt_model, megatron.core.pipeline_parallel.schedules
print("shim:", shim.status()["paged-stash"].state, "triton" in sys.modules)
"""


@in_full
def test_pipeline_schedules_are_imported_without_triton():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=patience())
    assert done.stdout.splitlines() == ["stock: triton", "shim: applied False"], done.stdout + done.stderr
