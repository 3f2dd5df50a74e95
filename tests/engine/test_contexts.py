"""with shim.patched() in several threads and tasks: refused, or right for all, and nothing stays patched at the end."""

import asyncio
import gc
import inspect
import threading

import pytest
from fake_world import same

import shim
from shim._planning.options import Arguments
from shim.testing.patience import patience


@pytest.fixture
def two(patched_world):
    """A world with the patches `count` and `more`, and what is in it before anything is applied."""
    patched_world.patch("more", ["megatron.core.ops:halve"])
    patched_world.before = patched_world.snapshot()
    return patched_world


def in_thread(action):
    """What `action` returns or raises in another thread."""
    found = []

    def run():
        try:
            found.append(action())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(patience())
    return found[0]


class Block:
    """`with shim.patched(...)` in a thread of its own, open until `end` is called."""

    def __init__(self, **arguments):
        self.begun, self.ending, self.error = threading.Event(), threading.Event(), None
        self.thread = threading.Thread(target=self.run, args=(arguments,))
        self.thread.start()
        assert self.begun.wait(patience())

    def run(self, arguments):
        try:
            with shim.patched(**arguments):
                self.begun.set()
                self.ending.wait(patience())
        except shim.ShimError as error:
            self.error = error
        finally:
            self.begun.set()

    def end(self):
        self.ending.set()
        self.thread.join(patience())
        assert not self.thread.is_alive()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_same_block_in_several_threads_lasts_until_the_last_ends(two, order):
    """In whatever order they end, all are patched while one is open, and nothing is afterwards."""
    blocks = [Block(only=["count"]) for _ in range(3)]
    for number in order:
        assert two.get("ops:double")(2) == ("count", 4)
        blocks[number].end()
    assert [block.error for block in blocks] == [None] * 3
    assert same(two.before, two.snapshot()) == []


def test_what_was_applied_before_overlapping_blocks_comes_back(two):
    """At the end of the last, not of the first."""
    shim.apply(only=["more"])
    first, second = Block(only=["count"]), Block(only=["count"])
    first.end()
    assert shim.status().applied == ("count",)
    second.end()
    assert shim.status().applied == ("more",) and two.get("ops:double")(2) == 4
    shim.revert()
    assert same(two.before, two.snapshot()) == []


def test_another_block_in_another_thread_is_refused(two):
    """Both are of the whole process, so one of them would run with the patches of the other."""
    block = Block(only=["count"])
    with pytest.raises(shim.OptionError, match=r"another thread or task is within.* Remedy: let it end first"):
        with shim.patched(only=["more"]):
            pass
    assert shim.status().applied == ("count",)
    block.end()
    assert block.error is None and same(two.before, two.snapshot()) == []


def test_a_nested_block_of_one_thread_keeps_others_out(two):
    """Also the same as the outer one, which is not in force within the inner one."""
    with shim.patched(only=["count"]), shim.patched(only=["more"]):
        for only in (["count"], ["more"]):
            assert isinstance(in_thread(lambda only=only: shim.patched(only=only).__enter__()), shim.OptionError)
    assert same(two.before, two.snapshot()) == []


def test_apply_and_revert_from_outside_of_a_block_are_refused(two):
    """The end of the block would undo them; within the block they hold until it ends."""
    block = Block(only=["count"])
    for call in (shim.apply, shim.revert):
        with pytest.raises(shim.OptionError, match=rf"shim\.{call.__name__}\(\) cannot be called while"):
            call()
    block.end()
    with shim.patched(only=["count"]):
        assert shim.apply(only=["more"]).applied == ("more",)
        assert shim.revert().applied == ()
    assert same(two.before, two.snapshot()) == []


def test_tasks_that_overlap_are_refused_and_those_that_wait_are_not(two):
    """A task suspends within its block; whoever calls asyncio.run() waits for all of it."""

    async def within(only, seconds):
        with shim.patched(only=only):
            await asyncio.sleep(seconds)
            return shim.status().applied

    async def main(second):
        return await asyncio.gather(within(["count"], 0.05), within(second, 0.01), return_exceptions=True)

    first, second = asyncio.run(main(["more"]))
    assert first == ("count",) and isinstance(second, shim.OptionError)
    assert asyncio.run(main(["count"])) == [("count",), ("count",)]
    assert same(two.before, two.snapshot()) == []
    with shim.patched(only=["count"]):
        assert asyncio.run(within(["more"], 0)) == ("more",)
        assert shim.status().applied == ("count",)
    assert same(two.before, two.snapshot()) == []


def test_generators_that_end_in_any_order_leave_nothing(two):
    """As fixtures and ExitStacks can be closed."""

    def block(only):
        with shim.patched(only=only):
            yield

    for first, second in ((0, 1), (1, 0)):
        blocks = [block(["count"]), block(["more"])]
        for one in blocks:
            next(one)
        blocks[first].close()
        assert shim.status().applied == (("more",), ("count",))[first]
        blocks[second].close()
        assert same(two.before, two.snapshot()) == []


def test_a_block_that_cannot_begin_leaves_the_others_alone(two):
    """Its failure takes nothing away, and it does not count as open."""
    with shim.patched(only=["count"]):
        with pytest.raises(shim.OptionError), shim.patched(only=["none-such"]):
            pass
        with pytest.raises(shim.NotMetError), shim.patched(only=["count"], require=["more"]):
            pass
        assert shim.status().applied == ("count",)
        assert in_thread(lambda: shim.patched(only=["count"]).__exit__(None, None, None)) is not None
        gc.collect()  # Python 3.10 leaves it to the collector to close a block that ends without a beginning
    assert same(two.before, two.snapshot()) == []


def test_the_end_of_a_block_asks_for_nothing_anew(two, tmp_path):
    """A lock that is gone by then, or a requirement that is not met any more, does not leave the block's patches on."""
    from shim._planning.lock import write_lock

    write_lock(tmp_path / "lock", shim.plan(only=["more"]))
    shim.apply(only=["more"], lock=tmp_path / "lock")
    with shim.patched(only=["count"]):
        (tmp_path / "lock").unlink()
    assert shim.status().applied == ("more",)
    shim.revert()
    assert same(two.before, two.snapshot()) == []


@pytest.mark.parametrize("name", ["apply", "plan", "patched", "run_environment", "ray_runtime_env"])
def test_signatures_say_what_can_be_given(two, name):
    """One by one, with what holds where nothing is given; a typo names the function that was called."""
    function = getattr(shim, name)
    parameters = inspect.signature(function).parameters
    for argument in vars(Arguments()):
        assert parameters[argument].kind is inspect.Parameter.KEYWORD_ONLY
    assert "strict: 'bool' = False (or MEGATRON_SHIM_STRICT)" in str(inspect.signature(function))
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'onyl'"):
        function(onyl=["count"])
