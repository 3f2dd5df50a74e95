"""A foreign function in the place of one of a module is tried before it is called a conflict, and needs no model."""

import pytest
from fake_world import WRAPPER

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
