"""What a patch relies on without binding it: check() and status() name an object of somebody else there."""

import functools

import pytest

import shim

CORE = "megatron.core."


def theirs(original):
    @functools.wraps(original)
    def foreign(*args, **kwargs):
        return ("foreign", original(*args, **kwargs))

    return foreign


def said_of(report, id="p"):
    return [sentence for sentence in report[id].others if "relies on" in sentence]


@pytest.fixture
def relying(world):
    """A patch of other:other that relies on a plain function and on three kinds of members of a class."""
    bodies = ("ops:double", "layers:Layer.forward", "layers:Layer.make", "layers:Layer.size")
    world.patch("p", [CORE + "other:other"], reads=[CORE + body for body in bodies])
    world.get("other:other")
    return world


@pytest.mark.parametrize("body", ["ops:double", "layers:Layer.forward", "layers:Layer.make", "layers:Layer.size"])
@pytest.mark.parametrize("first", [True, False])
def test_somebody_elses_function_is_named(relying, body, first):
    """In both orders, with its file; the patch stays applied, because its own targets are its own."""
    raw = relying.get(body)
    relying.get("other:other")
    if not first:
        shim.apply()
    if isinstance(raw, property):
        relying.set(body, property(theirs(raw.fget)))
    elif isinstance(raw, staticmethod):
        relying.set(body, staticmethod(theirs(raw.__func__)))
    else:
        relying.set(body, theirs(raw))
    if first:
        shim.apply()
    for report in (shim.status(), shim.check()):
        (sentence,) = said_of(report)
        assert report["p"].state == "applied"
        assert f"relies on {CORE}{body}" in sentence and "test_relied.py" in sentence
    relying.set(body, raw)
    assert not said_of(shim.status())


def test_upstreams_own_functions_are_not_named(relying):
    relying.get("ops:double"), relying.get("layers:Layer")
    shim.apply()
    assert not shim.check()["p"].others


def test_shims_own_functions_are_not_named(relying):
    """Another patch has bound what this one relies on."""
    relying.patch("q", [CORE + "ops:double", CORE + "layers:Layer.make"])
    relying.get("ops:double"), relying.get("layers:Layer")
    report = shim.apply()
    assert report["q"].state == "applied" and relying.get("ops:double").__wrapped__
    assert not shim.check()["p"].others


def test_somebody_above_shims_own_function_is_named(relying):
    relying.patch("q", [CORE + "ops:double"])
    shim.apply(only=["p", "q"])
    relying.set("ops:double", theirs(relying.get("ops:double")))
    (sentence,) = said_of(shim.status())
    assert "ops:double" in sentence and "test_relied.py" in sentence


def test_a_name_that_is_not_there_is_not_named(relying):
    """Upstream defines some names only where it can import something."""
    relying.get("ops:double")
    shim.apply()
    relying.set("ops:double", "missing")
    assert not said_of(shim.status())


def test_what_is_not_imported_is_not_looked_at(relying):
    shim.apply()
    assert not shim.check()["p"].others


def test_a_patch_that_is_left_out_relies_on_nothing(relying):
    relying.set("ops:double", theirs(relying.get("ops:double")))
    shim.apply(exclude=["p"])
    assert not shim.status()["p"].others
