"""shim.config_override without torch: what it writes, puts back, refuses, and carries into a later call."""

import asyncio
import contextlib
import dataclasses
import sys
import threading
import time
import types
import weakref

import pytest

import shim
from shim._config_override import recompute, threads
from shim._config_override.recompute import Place, carrying


@dataclasses.dataclass
class Config:
    fusion: bool = True
    layers: int = 2


class Default:
    """A config whose field is a default of its class."""

    fusion = True


class Checkpoint:
    """A stand-in for what a library keeps of a checkpoint, in a place that is watched as theirs are."""

    def __init__(self, function):
        self.function = function

    def again(self):
        return self.function()


@pytest.fixture(autouse=True)
def one_library(monkeypatch):
    """Where checkpoints of others are loaded, these tests would be about them."""
    for place in recompute.PLACES:
        monkeypatch.delitem(sys.modules, place.module, raising=False)
    place = Place(__name__, "Checkpoint", "function", "Checkpoint.again")
    monkeypatch.setattr(recompute, "PLACES", (*recompute.PLACES, place))
    yield
    assert_nothing_is_left()


def assert_nothing_is_left():
    assert recompute._claims == {} and recompute._watched == []
    assert "function" not in vars(Checkpoint)


def test_values_hold_inside_and_are_restored():
    config = Config()
    with shim.config_override(config, fusion=False, layers=3):
        assert config == Config(False, 3)
    assert config == Config()


def test_an_exception_restores_them():
    config = Config()
    with pytest.raises(ZeroDivisionError), shim.config_override(config, fusion=False):
        raise ZeroDivisionError
    assert config == Config()


def test_contexts_nest():
    config = Config()
    with shim.config_override(config, fusion=False, layers=3):
        with shim.config_override(config, fusion=True):
            assert config == Config(True, 3)
        assert config == Config(False, 3)


def test_an_unknown_field_is_named_and_nothing_is_written():
    config = Config()
    with (
        pytest.raises(shim.OptionError, match=r"Config has no field 'fussion'"),
        shim.config_override(config, layers=3, fussion=False),
    ):
        raise AssertionError
    assert vars(config) == vars(Config())


def test_what_cannot_be_written_leaves_nothing_written():
    class Guarded(Config):
        def __setattr__(self, name, value):
            if name == "fusion" and value is False:
                raise AttributeError("fusion is fixed")
            super().__setattr__(name, value)

    config = Guarded()
    with pytest.raises(AttributeError, match="fixed"), shim.config_override(config, layers=3, fusion=False):
        raise AssertionError
    assert config == Guarded()


def test_a_default_of_the_class_is_one_again():
    config = Default()
    with shim.config_override(config, fusion=False):
        assert config.fusion is False
    assert vars(config) == {} and config.fusion is True


def test_a_property_is_set_back():
    class Of:
        def __init__(self):
            self._fusion = True

        fusion = property(lambda self: self._fusion, lambda self, value: setattr(self, "_fusion", value))

    config = Of()
    with shim.config_override(config, fusion=False):
        assert config.fusion is False
    assert config.fusion is True


# Threads


def in_thread(function):
    found = []

    def run():
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


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
            leave.wait(10)

    thread = threading.Thread(target=other)
    with shim.config_override(config, fusion=False):
        thread.start()
        assert entered.wait(10)
    assert config.fusion is False
    leave.set()
    thread.join()
    assert config.fusion is True


class Blocked:
    """A function that another thread is inside of, from its second run on, until it is let go."""

    def __init__(self, function):
        self.function, self.inside, self.leave, self.runs = function, threading.Event(), threading.Event(), 0

    def __call__(self):
        first = self.function()
        self.inside.set()
        assert self.leave.wait(10)
        return first, self.function()


@contextlib.contextmanager
def recomputing(checkpoint, blocked):
    """Another thread is in the middle of it; at the end `found` holds what it returned."""
    found = []
    thread = threading.Thread(target=lambda: found.append(outcome(checkpoint.again)))
    thread.start()
    assert blocked.inside.wait(10)
    try:
        yield found
    finally:
        blocked.leave.set()
        thread.join()


def outcome(function):
    try:
        return function()
    except Exception as error:
        return error


GLOBAL = Config()


def of_a_global():
    return GLOBAL.layers


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


# What is assigned, and odd configs


def test_an_assignment_holds_until_the_context_is_left():
    config = Config()
    with shim.config_override(config, layers=5):
        config.layers = 7
        checkpoint = Checkpoint(lambda: config.layers)
        config.layers = 8
        with shim.config_override(config, layers=6):
            pass
        assert checkpoint.again() == 7 and config.layers == 8
    assert checkpoint.again() == 7 and config.layers == 2


def test_an_inherited_field_that_was_deleted_is_inherited_again():
    config = Default()
    with shim.config_override(config, fusion=False):
        del config.fusion
        checkpoint = Checkpoint(lambda: config.fusion)
    assert vars(config) == {} and checkpoint.again() is True


def test_an_own_field_that_was_deleted_is_there_again():
    config = Config()
    with shim.config_override(config, layers=5):
        del config.layers
    assert vars(config) == vars(Config())


class Proxy:
    """Reads what it does not have from another object; what is written stays with it."""

    def __init__(self, target):
        self.__dict__["target"] = target

    def __getattr__(self, name):
        return getattr(self.target, name)


class WritingProxy(Proxy):
    def __setattr__(self, name, value):
        setattr(self.target, name, value)


@pytest.mark.parametrize("kind", [Proxy, WritingProxy])
def test_a_proxy_is_as_before(kind):
    target = Config()
    config = kind(target)
    with shim.config_override(config, layers=5):
        checkpoint = Checkpoint(lambda: config.layers)
        assert config.layers == 5
    assert vars(config) == {"target": target} and target == Config()
    assert checkpoint.again() == 5 and vars(config) == {"target": target} and target == Config()


class Slotted:
    __slots__ = ("layers",)


def test_a_class_and_slots_are_as_before():
    class Inheriting(Default):
        layers = 2
        helper = staticmethod(len)

    slotted = Slotted()
    slotted.layers = 2
    before = dict(vars(Inheriting))
    with shim.config_override(Inheriting, layers=5, fusion=False, helper=max), shim.config_override(slotted, layers=5):
        checkpoint = Checkpoint(lambda: (Inheriting.layers, Inheriting.fusion, Inheriting.helper, slotted.layers))
        assert checkpoint.again() == (5, False, max, 5)
    assert dict(vars(Inheriting)) == before and slotted.layers == 2
    assert checkpoint.again() == (5, False, max, 5)
    assert dict(vars(Inheriting)) == before and slotted.layers == 2


# Changes in place


def test_a_container_that_is_changed_in_place_is_recomputed_as_it_was():
    config = types.SimpleNamespace(modules=[])
    with shim.config_override(config, modules=["mlp", {"of": ["moe"]}]):
        value = config.modules
        checkpoint = Checkpoint(lambda: repr(config.modules.append("seen") or config.modules))
        before = checkpoint.again()
        value[1]["of"].append("router")
        value.append("attention")
        assert checkpoint.again() == before == "['mlp', {'of': ['moe']}, 'seen']"
        assert config.modules is value
    assert checkpoint.again() == before and config.modules == []


def test_an_object_that_is_changed_in_place_is_refused():
    config, recipe = Config(), types.SimpleNamespace(margin=0, names=["a"])
    with shim.config_override(config, layers=recipe):
        checkpoint = Checkpoint(lambda: config.layers)
        assert checkpoint.again() is recipe
        for change in (lambda: recipe.names.append("b"), lambda: setattr(recipe, "margin", 1)):
            checkpoint = Checkpoint(lambda: config.layers)
            change()
            with pytest.raises(shim.OptionError, match="changed in place"):
                checkpoint.again()


# Failures


class Failing:
    """A config of which one operation fails: the number that is said, from 1. `late` does its work first."""

    def __init__(self, late):
        vars(self).update(layers=2, fusion=True, _left=0, _late=late)

    def _count(self, operation, *args):
        vars(self)["_left"] -= 1
        if self._left != 0 or self._late:
            operation(self, *args)
        if self._left == 0:
            raise AttributeError("frozen")

    def __setattr__(self, name, value):
        self._count(object.__setattr__, name, value)

    def fields(self):
        return self.layers, self.fusion


@pytest.mark.parametrize("late", [False, True], ids=["instead", "after"])
def test_a_failure_at_any_step_is_one_error_and_leaves_nothing(late):
    """Of entering, of leaving, and of a recompute, whose writes come in this order; what came last is not restored."""
    steps = 0
    for number in range(1, 20):
        config, sound = Failing(late), Config()
        with shim.config_override(config, layers=3, fusion=False):
            checkpoint = Checkpoint(lambda: config.fields())
        assert config.fields() == (2, True)

        vars(config)["_left"] = number
        errors = [error for error in (outcome(checkpoint.again), outcome(lambda: entered_once(config))) if error]
        failures = [error for error in errors if isinstance(error, AttributeError)]
        assert len(failures) == (config._left <= 0), errors
        assert_nothing_is_left()
        steps += len(failures)

        with shim.config_override(sound, layers=3):
            again = Checkpoint(lambda: sound.layers)
        assert again.again() == 3 and sound == Config()
        if failures:
            vars(config).update(layers=2, fusion=True)
            assert checkpoint.again() == (3, False) and config.fields() == (2, True)
    assert steps == 8


def entered_once(config):
    with shim.config_override(config, layers=4, fusion=None):
        assert config.fields() == (4, None)


def test_a_frozen_config_is_one_error_and_later_checkpoints_run():
    config = Failing(False)
    with pytest.raises(AttributeError, match="frozen"), shim.config_override(config, layers=3):
        vars(config)["_left"] = 1
    assert_nothing_is_left()
    assert Checkpoint(lambda: "fine").again() == "fine"


def test_places_that_cannot_be_watched_leave_nothing(monkeypatch):
    place = Place(__name__, "Missing", "function", "Missing.again")
    monkeypatch.setattr(recompute, "PLACES", (*recompute.PLACES, place))
    config = Config()
    monkeypatch.setattr("shim._config_override.override.refuse_what_is_not_carried", lambda: None)
    with pytest.raises(AttributeError), shim.config_override(config, layers=3):
        raise AssertionError
    assert config == Config()


# What is run again


def test_nothing_is_kept_but_the_function_where_nothing_is_overridden():
    def function():
        return 1

    checkpoint = Checkpoint(function)
    assert checkpoint.function is function and carrying(function) is function
    with shim.config_override(Config(), layers=3):
        kept = checkpoint.function
        assert kept is not function and kept() == 1
    assert checkpoint.function is function


def test_the_cells_of_a_function_are_seen_through_what_carries_it():
    layer = object()
    with shim.config_override(Config(), layers=3):
        checkpoint = Checkpoint(lambda: layer)
    assert layer in [cell.cell_contents for cell in checkpoint.function.__closure__]


def test_a_function_sees_later_what_it_would_have_seen_now():
    config = Config()
    with shim.config_override(config, fusion=False):
        run = carrying(lambda: (config.fusion, config.layers))
    assert run() == (False, 2) and config == Config()
    with shim.config_override(config, fusion=True, layers=5):
        assert run() == (False, 2)
        assert config.layers == 5
    assert in_thread(run) == (False, 2)


def test_a_function_from_outside_does_not_see_what_is_overridden_since():
    config = Config()
    checkpoint = Checkpoint(lambda: config.fusion)
    with shim.config_override(config, fusion=False):
        assert checkpoint.again() is True and config.fusion is False
    assert checkpoint.again() is True


def test_functions_nest_too():
    """The checkpoint inside of a recompute is entered anew, and sees what its own forward pass saw."""
    config, inner = Config(), []

    def outer():
        inner.append(carrying(lambda: config.fusion))
        return inner[-1]()

    with shim.config_override(config, fusion=False):
        run = carrying(outer)
        assert run() is False
    assert run() is False
    assert [function() for function in inner] == [False, False] and config.fusion is True


def test_an_exception_in_a_function_restores_what_was_there():
    config = Config()
    with shim.config_override(config, fusion=False):
        run = carrying(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run()
    assert config == Config()


def test_a_loaded_library_that_would_not_carry_them_is_refused(monkeypatch):
    """Rather than have its recompute run with other values."""
    random = types.ModuleType("megatron.core.tensor_parallel.random")
    random.CheckpointFunction = type("CheckpointFunction", (), {"forward": staticmethod(lambda ctx, run, *args: None)})
    monkeypatch.setitem(sys.modules, random.__name__, random)
    config = Config()
    with pytest.raises(shim.NotMetError, match=r"apply the patch config-override"):
        shim.config_override(config, fusion=False).__enter__()
    assert config == Config()


def test_a_torch_that_keeps_the_function_elsewhere_is_refused(monkeypatch):
    """Torch's releases have no fingerprints here, so it is asked itself."""
    torch_checkpoint = types.ModuleType("torch.utils.checkpoint")
    torch_checkpoint.CheckpointFunction = type("CheckpointFunction", (), {"forward": staticmethod(lambda ctx, run: 0)})
    monkeypatch.setitem(sys.modules, torch_checkpoint.__name__, torch_checkpoint)
    config = Config()
    with pytest.raises(shim.NotMetError, match=r"torch.utils.checkpoint:CheckpointFunction"):
        shim.config_override(config, fusion=False).__enter__()
    assert config == Config()


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
