"""Each remedy that a report names for a conflict, a shadowed or unknown patch works: it is followed here to the word.

The remedies of drifted patches ask for another installation, which tests/unit/test_match.py and test_plan.py look at.
"""

import logging
import re

import pytest
from fake_world import WRAPPER, Model

import shim

CORE = "megatron.core."
DOUBLE = CORE + "ops:double"
OTHER = CORE + "other:other"


def replaces(original):
    def replacement(*args):
        return "replaced"

    return replacement


def computes_anew(original):
    """Takes the calls that upstream's function takes, so that a patch which wraps any such function can wrap it."""

    def foreign(x, scale=2):
        return "replaced"

    return foreign


def hides_upstream(original):
    """Calls it, and holds it where nobody can write."""

    def foreign(x, call=original):
        return ("foreign", call(x))

    return foreign


def may_call(original):
    """Holds it in a list: reading does not tell whether it is called."""
    kept = [original]
    return lambda x: kept[0](x)


def by_a_variable(original):
    return lambda x: original(x)


@pytest.fixture
def patch(world):
    """Binds the patch p on ops:double, with these keys in the matrix."""

    def bind(**keys):
        world.patch("p", [{"target": DOUBLE, **keys}, OTHER])
        world.get("ops:double"), world.get("other:other")
        return world

    return bind


def put(world, sort):
    """Somebody's object around, or in the place of, what stands on ops:double now."""
    before = world.get("ops:double")
    world.set("ops:double", sort(before))
    return lambda: world.set("ops:double", before)


def nothing_is_amiss(caplog, model=None, state="applied"):
    """check() raises nothing, warns of nothing, and the patch has the state."""
    caplog.clear()
    report = shim.check(model)
    assert report["p"].state == state, report["p"].reason
    assert not [record for record in caplog.records if record.levelno > logging.INFO], caplog.text
    return report["p"]


def excluded(remedy):
    """The id that a remedy says to exclude."""
    return re.search(r"exclude (\w+)", remedy)[1]


@pytest.mark.parametrize("first", ["shim", "trainer"])
def test_a_replacement_is_removed(patch, first, caplog):
    world = patch()
    take_back = put(world, replaces) if first == "trainer" else None
    shim.apply()
    take_back = take_back or put(world, replaces)
    found = shim.status()["p"]
    assert found.state == "conflict" and found.remedy.startswith("remove ") and "replacement" in found.remedy
    take_back()
    nothing_is_amiss(caplog)
    assert world.get("ops:double")(2) == ("p", 4)


@pytest.mark.parametrize("first", ["shim", "trainer"])
def test_or_it_is_kept_and_the_patch_excluded(patch, first, caplog):
    world = patch()
    if first == "trainer":
        put(world, replaces)
    shim.apply()
    if first == "shim":
        put(world, replaces)
    shim.apply(exclude=[excluded(shim.status()["p"].remedy)])
    nothing_is_amiss(caplog, state="excluded")
    assert world.get("ops:double")(2) == "replaced" and world.get("other:other")(2) == 2


def test_a_wrapper_that_nobody_can_get_beneath_comes_after_shim(patch, caplog):
    world = patch()
    take_back = put(world, hides_upstream)
    found = shim.apply()["p"]
    assert found.state == "conflict" and found.remedy.startswith("call shim.apply() before ")
    take_back()  # a new run, in the other order
    shim.revert()
    shim.apply()
    put(world, hides_upstream)
    nothing_is_amiss(caplog)
    assert world.get("ops:double")(2) == ("foreign", ("p", 4))


@pytest.mark.parametrize("first", ["shim", "trainer"])
def test_a_patch_that_wraps_any_call_needs_no_remedy(patch, first, caplog):
    """It goes around a replacement, whoever came first."""
    world = patch(wraps="true")
    if first == "trainer":
        put(world, computes_anew)
    shim.apply()
    if first == "shim":
        put(world, computes_anew)
    found = nothing_is_amiss(caplog)
    assert world.get("ops:double")(2) == ("p", "replaced")
    assert "computes_anew" in found.reason and "computes_anew" in found.others[0]


@pytest.mark.parametrize("first", ["shim", "trainer"])
def test_what_takes_other_calls_is_not_to_be_wrapped(patch, first):
    """The reason says so, in both orders."""
    world = patch(wraps="true")
    if first == "trainer":
        put(world, replaces)
    shim.apply()
    if first == "shim":
        put(world, replaces)
    found = shim.status()["p"]
    assert found.state == "conflict" and "takes other arguments than upstream's" in found.reason
    assert found.remedy.startswith("remove ")


def test_a_target_that_the_patch_does_without_is_given_back(patch, caplog):
    """The warning names what stays wrong, and removing the other object fixes it."""
    world = patch(without="doubling is wrong")
    take_back = put(world, replaces)
    shim.apply()
    assert "Unless that does the same: doubling is wrong. Remedy: remove " in caplog.text
    assert shim.check()["p"].targets == {DOUBLE: "left", OTHER: "bound"}
    take_back()
    assert nothing_is_amiss(caplog).targets == {DOUBLE: "bound", OTHER: "bound"}


def test_what_is_unknown_is_made_known_by_a_variable(patch, caplog):
    world = patch()
    shim.apply()
    take_back = put(world, may_call)
    found = shim.check()["p"]
    assert (found.state, found.targets[DOUBLE]) == ("unknown", "unknown") and found.reason.startswith(
        "it cannot be told"
    )
    assert "call the original function from one of its own variables" in found.remedy
    take_back()
    put(world, by_a_variable)
    nothing_is_amiss(caplog)


def test_or_it_is_excluded(patch, caplog):
    world = patch()
    shim.apply()
    put(world, may_call)
    shim.apply(exclude=[excluded(shim.status()["p"].remedy)])
    nothing_is_amiss(caplog, state="excluded")


def test_one_remedy_is_enough_for_what_is_unknown(patch, caplog):
    """The trainer came first, and holds upstream's function in a list."""
    world = patch()
    take_back = put(world, may_call)
    assert "call the original function from one of its own variables" in shim.apply()["p"].remedy
    take_back()
    put(world, by_a_variable)
    nothing_is_amiss(caplog)


def test_a_failed_patch_is_excluded(world, caplog):
    world.patch("p", [DOUBLE], source="def bindings(variant, options):\n    raise RuntimeError('odd')\n")
    shim.apply()
    with pytest.raises(shim.ShimError, match="MEGATRON_SHIM_EXCLUDE=p"):
        world.get("ops:double")
    found = shim.status()["p"]
    assert found.state in ("failed", "pending") and "exclude" in (found.remedy or "exclude p")
    shim.apply(exclude=["p"])
    world.get("ops:double")
    nothing_is_amiss(caplog, state="excluded")


# On a model

FORWARD = CORE + "layers:Layer.forward"
# The patch cannot tell of an override.
NOT_TOLD = WRAPPER + "\n\n    def probe(module, target, models):\n        return None\n"


@pytest.fixture(params=["shadowed", "unknown"])
def layer(world, request):
    """The class with the patched forward. An override that calls nothing is shadowed, or not known to the probe."""
    world.patch("p", [FORWARD], WRAPPER if request.param == "shadowed" else NOT_TOLD)
    found = world.get("layers:Layer")
    shim.apply()
    found.state = request.param
    return found


def of_class(methods, base):
    return Model(type("Sub", (base,), methods)())


def its_own(self, x):
    return x + 2


def test_an_override_calls_the_method_of_its_base_class(layer, caplog):
    found = shim.check(of_class({"forward": its_own}, layer))["p"]
    assert found.state == layer.state and found.remedy.startswith("call the method of the base class in the override")

    class BySuper(layer):
        def forward(self, x):
            return super().forward(x + 1)

    nothing_is_amiss(caplog, Model(BySuper()))


def test_or_it_is_dropped_or_marked_where_a_test_shows_that_it_trains_right(layer, caplog):
    remedy = shim.check(of_class({"forward": its_own}, layer))["p"].remedy
    if layer.state == "shadowed":
        assert remedy.endswith("or drop the override")
        nothing_is_amiss(caplog, of_class({}, layer))
        return
    assert remedy.endswith("mark it with shim.compatible(TARGET)")

    @shim.compatible(FORWARD)
    def marked(self, x):
        return x + 2

    nothing_is_amiss(caplog, of_class({"forward": marked}, layer))


def test_a_model_keeps_a_function_that_it_took_before_until_it_is_set_again(world, caplog):
    """Or shim.apply() comes before the model is built."""
    world.patch("p", [DOUBLE])
    instance = world.get("layers:Layer")()
    instance.call = world.get("ops:double")
    shim.apply()
    found = shim.check(Model(instance))["p"]
    assert found.state == "unknown" and "again, or call shim.apply() before the model is built" in found.remedy
    instance.call = world.get("ops:double")
    nothing_is_amiss(caplog, Model(instance))
