"""shim.config_override in threads and in tasks: none reads the value of another, and none waits for another."""

import asyncio
import contextlib
import sys
import threading
import time
import types
import weakref

import pytest
from override_cases import Blocked, Checkpoint, Config, in_thread, one_library, outcome

import shim
from shim._config_override import recompute, threads
from shim.testing.patience import patience


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    with one_library(monkeypatch):
        yield


def test_another_thread_sees_the_value_and_may_ask_for_the_same():
    config = Config()

    def same():
        with shim.config_override(config, fusion=False):
            return config.fusion

    with shim.config_override(config, fusion=False):
        assert in_thread(same) is False
        assert config.fusion is False
    assert config.fusion is True


def test_another_thread_may_not_ask_for_another_value():
    config = Config()

    def other():
        with shim.config_override(config, layers=4):
            return config.layers

    with shim.config_override(config, layers=3):
        error = in_thread(other)
        assert isinstance(error, shim.OptionError) and "another thread" in str(error)
        assert config.layers == 3
    assert config.layers == 2


def test_overlapping_threads_restore_what_was_there_before_both():
    """Whichever leaves last; a toggle that remembers what it found would leave its neighbour's value behind."""
    config, entered, leave = Config(), threading.Event(), threading.Event()

    def other():
        with shim.config_override(config, fusion=False):
            entered.set()
            leave.wait(patience())

    thread = threading.Thread(target=other)
    with shim.config_override(config, fusion=False):
        thread.start()
        assert entered.wait(patience())
    assert config.fusion is False
    leave.set()
    thread.join()
    assert config.fusion is True


@contextlib.contextmanager
def recomputing(checkpoint, blocked):
    """Another thread is in the middle of it; at the end `found` holds what it returned."""
    found = []
    thread = threading.Thread(target=lambda: found.append(outcome(checkpoint.again)))
    thread.start()
    assert blocked.inside.wait(patience())
    try:
        yield found
    finally:
        blocked.leave.set()
        thread.join()


GLOBAL = Config()


def of_a_global():
    return GLOBAL.layers


@pytest.mark.no_cover
def test_an_override_does_not_leak_into_a_recompute_of_another_thread():
    """Which keeps nothing, and has registered nothing: it is found on the stack of its thread."""
    config = Config()
    for chosen, function in ((config, lambda: config.layers), (GLOBAL, of_a_global)):
        blocked = Blocked(function)
        with recomputing(Checkpoint(blocked), blocked) as found:
            with pytest.raises(shim.OptionError, match="recomputing"), shim.config_override(chosen, layers=9):
                raise AssertionError
            with shim.config_override(chosen, layers=2), shim.config_override(Config(), layers=9):
                pass  # the same value, and another config
        assert found == [(2, 2)]
        with shim.config_override(chosen, layers=9):
            pass


def test_a_recompute_does_not_leak_into_an_override_of_another_thread():
    """One from outside, and one from an override with another value."""
    config = Config()
    outside = Checkpoint(lambda: config.layers)
    with shim.config_override(config, layers=3):
        inside = Checkpoint(lambda: config.layers)
    with shim.config_override(config, layers=9):
        for checkpoint in (outside, inside):
            error = in_thread(checkpoint.again)
            assert isinstance(error, shim.OptionError) and config.layers == 9
    assert in_thread(outside.again) == 2 and in_thread(inside.again) == 3


def test_threads_with_configs_of_their_own_do_not_meet():
    ours, theirs = Config(), Config()
    outside = Checkpoint(lambda: theirs.layers)
    with shim.config_override(ours, layers=9):
        inside = in_thread(lambda: Checkpoint(lambda: theirs.layers))
        assert in_thread(outside.again) == in_thread(inside.again) == 2
    assert type(vars(inside)["function"]) is types.FunctionType


@pytest.mark.no_cover
def test_a_recompute_that_writes_does_not_leak_into_one_of_another_thread():
    config = Config()
    with shim.config_override(config, layers=3):
        inside = Checkpoint(lambda: config.layers)
    blocked = Blocked(lambda: config.layers)
    with recomputing(Checkpoint(blocked), blocked) as found:
        assert isinstance(outcome(inside.again), shim.OptionError)
    assert found == [(2, 2)] and inside.again() == 3


def test_another_thread_recomputes_what_ran_in_an_override_while_it_is_entered():
    config = Config()
    with shim.config_override(config, layers=3):
        checkpoint = Checkpoint(lambda: config.layers)
        assert in_thread(checkpoint.again) == 3


def test_a_recompute_that_waits_to_have_the_same_value_is_no_conflict():
    config = Config()
    with shim.config_override(config, layers=3):
        checkpoint = Checkpoint(lambda: config.layers)
    found, called = [], recompute._Carried.__call__.__code__
    with recompute._lock:
        thread = threading.Thread(target=lambda: found.append(outcome(checkpoint.again)))
        thread.start()
        while not any(frame.f_code is called for frame in threads._stack(top_of(thread))):
            time.sleep(0.001)
        with shim.config_override(config, layers=3):
            pass
        with pytest.raises(shim.OptionError, match="recomputing"), shim.config_override(config, fusion=False):
            raise AssertionError
    thread.join()
    assert found == [3] and config == Config()


def top_of(thread):
    return sys._current_frames().get(thread.ident)


class Uncomparable:
    """As a tensor of two elements: what == gives is neither true nor false."""

    def __eq__(self, other):
        return self

    def __bool__(self):
        raise RuntimeError("ambiguous")


def test_values_that_cannot_be_compared_are_different():
    config, value = Config(), Uncomparable()

    def entered(value):
        with shim.config_override(config, layers=value):
            return config.layers

    with shim.config_override(config, layers=value):
        assert in_thread(lambda: entered(value)) is value
        assert isinstance(in_thread(lambda: entered(Uncomparable())), shim.OptionError)
        assert entered(Uncomparable()) is not value


def test_one_is_not_true():
    config = Config(layers=1)
    with shim.config_override(config, layers=1):
        error = in_thread(lambda: shim.config_override(config, layers=True).__enter__())
    assert isinstance(error, shim.OptionError)


# Tasks of asyncio, which take turns in one thread


async def reading(config, layers):
    """What a task reads in an override of its own, before and after others had their turn."""
    try:
        with shim.config_override(config, layers=layers):
            await asyncio.sleep(0)
            before = config.layers
            await asyncio.sleep(0)
            return before, config.layers
    except shim.OptionError:
        return "refused"


async def together(*tasks):
    return await asyncio.gather(*tasks)


def test_a_task_never_reads_the_value_of_another():
    config = Config()
    assert asyncio.run(together(reading(config, 5), reading(config, 7))) == [(5, 5), "refused"]
    assert asyncio.run(together(reading(config, 5), reading(config, 5))) == [(5, 5), (5, 5)]
    assert asyncio.run(together(reading(config, 5), reading(Config(), 7))) == [(5, 5), (7, 7)]
    assert config == Config()


def test_a_task_may_not_change_what_it_shares_with_another():
    """Its own claim is on top of the other's, which reads the same field."""
    config = Config()

    async def changing():
        with shim.config_override(config, layers=5):
            return await reading(config, 7)

    assert asyncio.run(together(reading(config, 5), changing())) == [(5, 5), "refused"]


def test_an_override_around_the_loop_is_around_each_task():
    """One task alone may nest in it, and beside others none."""
    config = Config()
    with shim.config_override(config, layers=4):
        assert asyncio.run(reading(config, 5)) == (5, 5)
        assert asyncio.run(together(reading(config, 5), reading(config, 4))) == ["refused", (4, 4)]
        assert config.layers == 4


def test_contexts_of_one_task_nest():
    config = Config()

    async def nested():
        with shim.config_override(config, layers=4):
            return await reading(config, 5), config.layers

    assert asyncio.run(nested()) == ((5, 5), 4)


def test_a_recompute_in_a_task_runs_while_another_is_in_an_override():
    """No task goes on before it ends."""
    config, entered, done = Config(), asyncio.Event(), asyncio.Event()
    with shim.config_override(config, layers=7):
        checkpoint = Checkpoint(lambda: config.layers)

    async def overriding():
        with shim.config_override(config, layers=5):
            entered.set()
            await done.wait()
            return config.layers

    async def recomputing_meanwhile():
        await entered.wait()
        try:
            return checkpoint.again()
        finally:
            done.set()

    assert asyncio.run(together(overriding(), recomputing_meanwhile())) == [5, 7]


holder = types.ModuleType("holder_of_a_config")
holder.inner = types.ModuleType("holder_of_a_config.inner")


def by_import():
    import holder_of_a_config

    return holder_of_a_config.layers_of


def by_submodule():
    return holder.inner.config


def by_cell(module):
    return lambda: module.config


@pytest.mark.parametrize("way", ["import", "submodule", "cell", "weak reference"])
def test_a_config_is_reached(way, monkeypatch):
    """In whatever way a function comes by it; else another thread's override would go unnoticed."""
    monkeypatch.setitem(sys.modules, holder.__name__, holder)
    config = Config()
    monkeypatch.setattr(holder, "config", config, raising=False)
    monkeypatch.setattr(holder, "layers_of", lambda: config.layers, raising=False)
    monkeypatch.setattr(holder.inner, "config", config, raising=False)
    ways = {"import": by_import, "submodule": by_submodule, "cell": by_cell(holder)}
    assert threads.reaches([ways.get(way, weakref.ref(config))], config)
    assert not threads.reaches([ways.get(way, weakref.ref(config))], Config())
