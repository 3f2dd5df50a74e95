"""`report.ran`: the patches of which a function has run. Nothing is added to the functions."""

import sys

import pytest

import shim
from shim._engine.ran import HAVE_RUN

CALLS = 8 if sys.version_info < (3, 12) else 1  # Python 3.11 shows a function from its eighth call on
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not show what has run")


@pytest.fixture
def applied(world):
    """Two patches of one `def`, whose functions share a code."""
    world.patch("first", ["megatron.core.ops:double"])
    world.patch("second", ["megatron.core.layers:Layer.forward"])
    world.get("ops:double"), world.get("layers:Layer")
    shim.apply()
    return world


def call(function, *arguments):
    for _ in range(CALLS):
        function(*arguments)


def test_only_what_has_run_is_named(applied):
    assert shim.status().ran == ()
    call(applied.get("ops:double"), 2)
    assert shim.status().ran == ("first",)
    call(applied.get("layers:Layer")().forward, 1)
    assert shim.status().ran == ("first", "second")


def test_it_is_told_in_text_and_as_data(applied):
    call(applied.get("ops:double"), 2)
    report = shim.status()
    assert f"  {HAVE_RUN} in this process: first\n" in str(report) and report.to_dict()["ran"] == ["first"]


def test_a_report_is_the_same_whatever_has_run(applied):
    """What is in force is compared, also by `status() == before`."""
    before = shim.status()
    call(applied.get("ops:double"), 2)
    assert shim.status().ran != before.ran and shim.status() == before


def test_a_second_apply_sees_functions_made_anew(applied):
    """Of a `def` that has run already under the first one."""
    call(applied.get("ops:double"), 2)
    shim.apply(exclude=["first"])
    shim.apply()
    call(applied.get("layers:Layer")().forward, 1)
    assert "second" in shim.status().ran


def tools():
    return [sys.monitoring.get_tool(tool) for tool in range(6)]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is of Python 3.12")
def test_a_tool_of_monitoring_is_taken_by_apply_and_given_back_by_revert(applied):
    """And by no question. What has run before stays known."""
    assert "megatron-shim" in tools()
    call(applied.get("ops:double"), 2)
    shim.revert()
    assert shim.status().ran == ("first",) and "megatron-shim" not in tools()
    shim.apply()
    call(applied.get("layers:Layer")().forward, 1)
    assert shim.status().ran == ("first", "second")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is of Python 3.12")
def test_without_a_free_tool_nothing_is_known(world):
    for tool in (3, 4):
        if sys.monitoring.get_tool(tool) is not None:  # of the engine of a test before
            sys.monitoring.free_tool_id(tool)
        sys.monitoring.use_tool_id(tool, "theirs")
    try:
        world.patch("first", ["megatron.core.ops:double"])
        world.get("ops:double")
        assert shim.apply().ran is None
    finally:
        for tool in (3, 4):
            sys.monitoring.free_tool_id(tool)


def test_a_code_of_two_patches_tells_nothing(applied):
    """One `def` may have made the functions of both."""
    from shim._engine import engine

    ran = engine.ENGINE.binder.ran

    def made_for(patch):
        def function():
            return patch

        ran.watch(patch, function)
        return function

    call(made_for("one"))
    first = made_for("third"), made_for("fourth")
    for function in first:
        call(function)
    assert not {"third", "fourth"} & ran.ids()


def test_python_310_says_nothing(applied, monkeypatch):
    from shim._engine import engine, ran

    monkeypatch.setattr(ran, "_MONITORING", None)
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    assert engine.ENGINE.binder.ran.ids() is None and shim.status().ran is None
