"""Nothing is logged while the engine's lock is held: a handler may wait for another thread that waits for shim."""

import _imp
import importlib.machinery
import importlib.util
import logging
import shutil
import sys
import threading

import pytest

import shim
from shim._engine import engine
from shim.testing.patience import patience

CORE = "megatron.core."


class Handler(logging.Handler):
    """Calls `act` for each record, and keeps texts with what `act` has returned."""

    def __init__(self, act):
        super().__init__()
        self.act, self.found = act, []

    def emit(self, record):
        self.found.append((record.getMessage(), self.act()))


@pytest.fixture
def listening():
    """Begin to listen with a handler that does what is given; returns what it finds, and ends with the test."""
    log, handlers = logging.getLogger("shim"), []

    def listen(act):
        handlers.append(Handler(act))
        log.addHandler(handlers[-1])
        return handlers[-1].found

    yield listen
    for handler in handlers:
        log.removeHandler(handler)


def other(x):
    return x


def unknown_variable(world, monkeypatch):
    monkeypatch.setenv("MEGATRON_SHIM_REQIURE", "count")
    return shim.apply


def another_copy(world, monkeypatch):
    shim.apply()
    shutil.copytree(world.root / "megatron", world.root / "second" / "megatron")
    monkeypatch.syspath_prepend(str(world.root / "second"))
    return lambda: importlib.import_module(CORE + "ops")


def foreign_object(world, monkeypatch):
    world.module(
        "theirs", "from megatron.core import ops\n\n\ndef mine(x, scale=2):\n    return x\n\n\nops.double = mine\n"
    )
    importlib.import_module(CORE + "theirs")
    return shim.apply


def lost_item(world, monkeypatch):
    world.get("ops:double")
    shim.apply()
    world.set("ops:double", other)
    return shim.revert


def in_a_factory(world, monkeypatch):
    source = """
        import logging


        def wrap(original):
            logging.getLogger("shim").warning("%s: a word of a factory", ID)
            return lambda x, scale=2: original(x, scale)


        def bindings(variant, options):
            return dict.fromkeys(TARGETS, wrap)
        """
    world.patch("word", [CORE + "other:other"], source)
    world.get("other:other")
    return shim.apply


@pytest.fixture(params=[unknown_variable, another_copy, foreign_object, lost_item, in_a_factory])
def warns(request, patched_world, monkeypatch):
    """Something to call that warns once, in a world that is made up for it."""
    return request.param(patched_world, monkeypatch)


def test_whoever_logs_does_not_hold_the_lock(warns, listening):
    found = listening(engine.ENGINE.lock._is_owned)
    warns()
    assert len(found) == 1
    assert not found[0][1], found


def test_a_handler_may_wait_for_a_thread_that_asks_for_the_status(warns, listening):
    mine, held, asked = threading.Lock(), threading.Event(), threading.Event()

    def ask():
        with mine:
            held.set()
            assert asked.wait(patience())
            shim.status()

    def act():
        asked.set()
        if not mine.acquire(timeout=patience()):
            return "waited in vain"
        mine.release()
        return "fine"

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert held.wait(patience())
    found = listening(act)
    warns()
    thread.join(patience())
    assert [what for _, what in found] == ["fine"]


def test_what_is_found_while_a_module_is_searched_is_said_when_that_has_run(patched_world, listening):
    """importlib holds a lock of the whole process while it asks finders, so nothing is logged there."""
    world = patched_world
    shim.apply()
    world.get("layers:Layer.forward")
    spec = importlib.machinery.PathFinder.find_spec(CORE + "ops", sys.modules["megatron.core"].__path__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.double = other
    found = listening(_imp.lock_held)
    sys.modules[CORE + "ops"] = module  # past the hook
    world.get("other:other")
    assert [(CORE + "ops:double holds" in text, held) for text, held in found] == [(True, False)]
