"""shim.config_override without torch: what it writes, puts back, refuses, and carries into a later call."""

import dataclasses
import sys
import threading
import types

import pytest

import shim
from shim import _config_override
from shim._config_override import carrying


@dataclasses.dataclass
class Config:
    fusion: bool = True
    layers: int = 2


class Default:
    """A config whose field is a default of its class."""

    fusion = True


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    """Where checkpoints of others are loaded, these tests would be about them."""
    for name in {carrier.module for carrier in _config_override._CARRIERS} | {"torch.utils.checkpoint"}:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    assert _config_override._fields == {}


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


# What is run again


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
    run = carrying(lambda: config.fusion)
    with shim.config_override(config, fusion=False):
        assert run() is True and config.fusion is False
    assert run() is True


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
