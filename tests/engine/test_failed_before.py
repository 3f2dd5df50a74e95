"""What a patch that could not be bound leaves for later calls, blocks and imports: it is tried anew or stays failed."""

import importlib
import threading

import pytest

import shim

CORE = "megatron.core."

# Says its mode in front of a result; the mode "bad" fails on the last target.
MODES = """
    import functools


    def bindings(variant, options):
        def wrap(original):
            return functools.wraps(original)(lambda *args, **kwargs: (options["mode"], original(*args, **kwargs)))

        def last(original):
            if options["mode"] == "bad":
                raise ValueError("bad mode")
            return wrap(original)

        return {target: last if target == TARGETS[-1] else wrap for target in TARGETS}
    """
BAD = {"p": {"mode": "bad"}}


@pytest.fixture
def modes(world):
    """The patch `p` on a module that is loaded and on one that is not, with its mode; `good` on a third."""
    world.patch("p", [CORE + "layers:Layer.forward", CORE + "ops:double"], MODES, options={"mode": "plain"})
    world.patch("good", [CORE + "other:other"])
    world.original = world.get("layers:Layer.forward")
    return world


def fail_at_the_import():
    with pytest.raises(shim.BindError, match="bad mode"):
        importlib.import_module(CORE + "ops")
    assert shim.status()["p"].state == "failed"


def test_a_later_apply_tries_it_anew(modes):
    shim.apply(options=BAD)
    fail_at_the_import()
    assert shim.apply()["p"].state == "pending"
    assert modes.get("layers:Layer")().forward(1) == ("plain", 2)
    assert modes.get("ops:double")(2) == ("plain", 4)


def test_it_stays_failed_where_a_later_apply_raises(modes):
    """The plan of before is in force again, with what has failed under it."""
    modes.patch("more", [CORE + "layers:Layer.backward"], MODES, options={"mode": "plain"})
    shim.apply(options=BAD)
    fail_at_the_import()
    with pytest.raises(shim.BindError, match="more failed"):
        shim.apply(options={**BAD, "more": {"mode": "bad"}})
    assert shim.status()["p"].state == "failed"
    assert modes.get("layers:Layer.forward") is modes.original


def test_the_import_of_something_else_does_not_bring_half_of_it_back(modes):
    shim.apply(options=BAD)
    fail_at_the_import()
    assert modes.get("other:other")(2) == ("good", 2)
    assert shim.status()["p"].state == "failed"
    assert modes.get("layers:Layer.forward") is modes.original


def test_the_end_of_a_block_brings_back_what_failed_inside(modes):
    shim.apply()
    with shim.patched(options=BAD):
        fail_at_the_import()
        assert modes.get("layers:Layer.forward") is modes.original
    assert modes.get("layers:Layer")().forward(1) == ("plain", 2)
    assert modes.get("ops:double")(2) == ("plain", 4)


def test_a_block_that_could_not_begin_is_in_nobodys_way(modes):
    """Another thread may apply afterwards."""
    modes.get("ops:double")
    with pytest.raises(shim.BindError, match="bad mode"):
        with shim.patched(options=BAD):
            raise AssertionError("the block has begun")
    found = []
    thread = threading.Thread(target=lambda: found.append(shim.apply(only=["p"])))
    thread.start()
    thread.join()
    assert [report.applied for report in found] == [("p",)]
