"""Where reading does not tell whether a foreign object calls shim's function, its first calls do."""

import sys

import pytest

import shim
from shim._engine.call_watch import CallWatch

CORE = "megatron.core."
watches = pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring comes with Python 3.12")


@watches
def test_the_first_call_ends_the_doubt(world):
    """And the watch with it: no tool of sys.monitoring stays in use."""
    world.patch("p", [CORE + "ops:double"])
    world.get("ops:double")
    shim.apply()
    table = {"double": world.get("ops:double")}
    world.set("ops:double", lambda x: ("foreign", table["double"](x)))
    assert shim.status()["p"].state == "pending"
    table["double"](2)  # not by the foreign function
    assert shim.status()["p"].state == "pending"
    assert world.get("ops:double")(2) == ("foreign", ("p", 4))
    report = shim.status()
    assert (report["p"].state, report["p"].targets) == ("applied", {CORE + "ops:double": "called"})
    assert [sys.monitoring.get_tool(tool) for tool in (3, 4, 5)] == [None] * 3


@watches
def test_functions_with_one_code_are_told_apart():
    def wrapper_of(function):
        return lambda x: function(x)

    one, other = wrapper_of(abs), wrapper_of(str)
    watch = CallWatch()

    def foreign(x):
        return other(x)

    assert not watch.saw(foreign, one) and foreign(1) == "1" and not watch.saw(foreign, one)
    assert not watch.saw(foreign, other) and foreign(1) == "1" and watch.saw(foreign, other)
    watch.forget()
    assert [sys.monitoring.get_tool(tool) for tool in (3, 4, 5)] == [None] * 3


def test_what_has_no_code_is_not_watched():
    watch = CallWatch()
    assert not watch.saw(print, lambda: None) and not watch.saw(lambda: None, print)
