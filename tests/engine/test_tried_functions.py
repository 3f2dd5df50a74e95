"""A foreign function in the place of one of a module is tried before it is called a conflict, and needs no model."""

import contextlib
import types

import pytest
from fake_world import WRAPPER, Model

import shim

DOUBLE = "megatron.core.ops:double"
PROBE = (
    WRAPPER.partition("    def probe")[0]
    + """
    def probe(function, target, models):
        assert target == TARGETS[0]
        result = function(2)
        return result if isinstance(result, str) else result == 4
    """
)
PROBE_OF_RESULTS = (
    WRAPPER.partition("    def probe")[0]
    + """
    def probe(function, target, models):
        result = function(2)
        return isinstance(result, tuple) and result[0] == ID
    """
)


@pytest.fixture(params=["shim", "trainer"])
def put(request, world):
    """Puts a function in the place of upstream's, which a patch wraps, before apply() or after it."""
    world.patch("p", [DOUBLE], PROBE, probe=[DOUBLE])
    world.get("ops:double")

    def put(function):
        if request.param == "trainer":
            world.set("ops:double", function)
        shim.apply(require=["p"])
        if request.param == "shim":
            world.set("ops:double", function)
        return world

    return put


def test_a_function_that_does_what_the_patch_does_is_no_conflict(put, caplog):
    """Not even under require: in both orders, and until it was tried nothing is said of it but that."""
    put(lambda x: 2 * x)
    found = shim.status()["p"]
    assert found.state == "unknown" and found.remedy.startswith("call shim.check(), which tries ")
    assert "emaining defect" not in caplog.text
    for report in (shim.check(), shim.status()):
        assert report["p"].state == "applied" and report["p"].targets == {DOUBLE: "kept"}
        assert "as tried the patch loses nothing by it" in report["p"].others[0]


def test_a_function_that_has_the_defect_is_a_conflict(put):
    put(lambda x: 3 * x)
    with pytest.raises(shim.NotMetError, match=r"p is conflict: .* which keeps the patch from its effect"):
        shim.check()
    assert shim.status()["p"].state == "conflict"


def test_a_function_that_not_all_callers_reach_is_a_doubt(world):
    """It is right, and a module that took upstream's before goes on with that."""
    world.patch("p", [DOUBLE], PROBE, probe=[DOUBLE])
    world.get("users:double")
    world.set("ops:double", lambda x: 2 * x)
    shim.apply()
    found = shim.check()["p"]
    assert (
        found.state == "unknown"
        and "megatron.core.users.double, megatron.core.users.twice still hold" in found.reason
        and "upstream's own" in found.reason
    )


@pytest.mark.parametrize(
    ("function", "why"), [(lambda x: "of another day", "of another day"), (lambda: 1, "TypeError")]
)
def test_what_cannot_be_told_stays_a_doubt(put, function, why):
    put(function)
    found = shim.check()["p"]
    assert found.state == "unknown" and why in found.reason and "shim.compatible" in found.remedy


def test_where_a_patch_goes_around_a_function_the_two_are_tried_together(world):
    """Callers reach the patch, which corrects what the function beneath it gets wrong."""
    world.patch("p", [{"target": DOUBLE, "wraps": "true"}], PROBE_OF_RESULTS, probe=[DOUBLE])
    world.get("ops:double")
    world.set("ops:double", lambda x, scale=2: 3 * x)
    shim.apply(require=["p"])
    assert shim.check()["p"].state == "applied" and shim.status()["p"].state == "applied"
    assert world.get("ops:double")(2) == ("p", 6)


def test_what_a_patch_goes_around_may_keep_it_from_its_effect(world):
    world.patch("p", [{"target": DOUBLE, "wraps": "true"}], PROBE_OF_RESULTS.replace("== ID", "== 6"), probe=[DOUBLE])
    world.get("ops:double")
    world.set("ops:double", lambda x, scale=2: 3 * x)
    shim.apply(require=["p"])
    with pytest.raises(shim.NotMetError, match="p is conflict"):
        shim.check()


@pytest.fixture
def way(world):
    """The patch p on ways:inner, which a call reaches by ways:outer."""
    module = world.module("ways", "def inner(x):\n    return x\n\n\ndef outer(x):\n    return inner(x)\n")
    target = {"target": module + ":inner", "reached_by": f"[{module}:outer]"}
    world.patch("p", [target], PROBE.replace("TARGETS[0]", "'megatron.core.ways:outer'"), probe=[module + ":outer"])
    world.get("ways:outer")
    return world


@pytest.mark.parametrize("first", ["shim", "trainer"])
@pytest.mark.parametrize(
    ("function", "state"),
    [(lambda x: 2 * x, "applied"), (lambda x: 3 * x, "conflict"), (lambda x: "of another day", "unknown")],
)
def test_a_function_on_the_way_is_tried_as_one_in_the_place_of_the_target(way, first, function, state):
    if first == "trainer":
        way.set("ways:outer", function)
    shim.apply(require=["p"])
    way.set("ways:outer", function)
    assert shim.status()["p"].state == "unknown"
    with contextlib.nullcontext() if state != "conflict" else pytest.raises(shim.NotMetError, match="p is conflict"):
        shim.check()
    assert shim.status()["p"].state == state


def test_what_a_model_says_of_a_function_holds_for_this_model_alone(world):
    """Its config may say that nothing runs the function."""
    asks = PROBE.replace("result = function(2)", "result = 4 if not any(m.config.on for m in models) else 'it is on'")
    world.patch("p", [DOUBLE], asks, probe=[DOUBLE])
    world.get("ops:double")
    world.set("ops:double", lambda x: 3 * x)
    shim.apply()
    model = Model()
    model.config = types.SimpleNamespace(on=False)
    assert shim.check(model)["p"].state == "applied"
    model.config.on = True
    assert shim.status()["p"].reason.endswith("shim.check has not tested yet whether the patch has its effect")
    assert "it is on" in shim.check(model)["p"].reason


def test_each_check_tries_anew(world):
    """Two functions of the same code may hold different things; without a model, too."""
    world.patch("p", [DOUBLE], PROBE, probe=[DOUBLE])
    world.get("ops:double")
    for factor, state in ((2, "applied"), (3, "conflict")):
        world.set("ops:double", lambda x, factor=factor: factor * x)
        shim.apply()
        assert shim.check()["p"].state == state
