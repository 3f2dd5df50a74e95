"""shim.config_override without torch: what it writes, puts back, refuses, and carries into a later call."""

import sys
import types

import pytest
from override_cases import Checkpoint, Config, Default, assert_nothing_is_left, in_thread, one_library, outcome

import shim
from shim._config_override import recompute
from shim._config_override.recompute import Place, carrying


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    with one_library(monkeypatch):
        yield


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
