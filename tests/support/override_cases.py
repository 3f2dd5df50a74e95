"""Configs, and a checkpoint that is watched as those of libraries are, for tests of config_override without torch."""

import contextlib
import dataclasses
import sys
import threading

from shim._config_override import recompute
from shim._config_override.recompute import Place
from shim.testing.patience import patience


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


@contextlib.contextmanager
def one_library(monkeypatch):
    """Checkpoint is the only one that is loaded: where those of others are, tests would be about them."""
    for place in recompute.PLACES:
        monkeypatch.delitem(sys.modules, place.module, raising=False)
    place = Place(__name__, "Checkpoint", "function", "Checkpoint.again")
    monkeypatch.setattr(recompute, "PLACES", (*recompute.PLACES, place))
    yield
    assert_nothing_is_left()


def assert_nothing_is_left():
    assert recompute._claims == {} and recompute._watched == []
    assert "function" not in vars(Checkpoint)


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


def outcome(function):
    try:
        return function()
    except Exception as error:
        return error


class Blocked:
    """A function that another thread is inside of, from its second run on, until it is let go.

    Here and not beside the tests, because pytest writes calls of its own into the asserts of their files. Through these
    the search for a config would go through all of pytest, and give up in a run of many tests.
    """

    def __init__(self, function):
        self.function, self.inside, self.leave, self.runs = function, threading.Event(), threading.Event(), 0

    def __call__(self):
        first = self.function()
        self.inside.set()
        assert self.leave.wait(patience())
        return first, self.function()
