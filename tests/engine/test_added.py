"""Targets that the release lacks: bound where nothing was, and gone after revert()."""

import sys

import pytest
from fake_world import ADDED, same

import shim

CORE = "megatron.core."
SOURCE = """
    def plain(missing):
        def triple(x):
            return ID, x * 3, repr(missing)

        return triple


    def of_class(missing):
        @classmethod
        def name(cls):
            return ID, cls.__name__

        return name


    def bindings(variant, options):
        return {target: of_class if target.rpartition(":")[2].startswith("Layer") else plain for target in TARGETS}
    """


@pytest.fixture
def adding(world):
    world.patch("p", [(CORE + "ops:triple", ADDED), (CORE + "layers:Layer.name", ADDED)], SOURCE)
    return world


@pytest.mark.parametrize("imported", [True, False])
def test_it_is_there_after_apply_and_gone_after_revert(adding, imported):
    """On a module and on a class, whether they were imported before or not; subclasses inherit it."""
    if imported:
        before = adding.snapshot()
    report = shim.apply()
    assert report["p"].state == ("applied" if imported else "pending")
    assert adding.get("ops:triple")(2) == ("p", 6, "MISSING")
    assert adding.get("layers:Child").name() == ("p", "Child")
    assert shim.status()["p"].state == "applied"
    shim.revert()
    assert adding.get("ops:triple") == "missing"
    assert not hasattr(adding.get("layers:Layer"), "name")
    if imported:
        assert same(before, adding.snapshot()) == []


def test_who_took_it_by_name_keeps_it(adding):
    """Without shim his import would have failed, so there is nothing to give back."""
    adding.module("taker", "from megatron.core.ops import triple as mine\n")
    shim.apply()
    mine = adding.get("taker:mine")
    shim.revert()
    assert adding.get("taker:mine") is mine


def test_a_release_that_has_it_by_now_is_drifted(adding):
    adding.module("ops", "def double(x, scale=2):\n    return x\n\n\ndef triple(x):\n    return x\n")
    decision = shim.plan()["p"]
    assert decision.action == "drifted"
    assert "megatron.core.ops:triple: its body is not that of any pinned release" in decision.reason


def test_a_target_that_imported_an_added_name_goes_back_to_what_its_guard_leaves(world):
    """A module guards its import of a name that shim adds: after revert() it holds None, as it would have."""
    world.module("taker", "try:\n    from megatron.core.ops import triple\nexcept ImportError:\n    triple = None\n")
    world.patch("p", [(CORE + "ops:triple", ADDED), CORE + "taker:triple"], SOURCE)
    shim.apply()
    assert world.get("taker:triple")(2) == ("p", 6, "None")
    assert shim.status()["p"].state == "applied"
    shim.revert()
    assert world.get("taker:triple") is None
    assert world.get("ops:triple") == "missing"


@pytest.mark.parametrize("defined", [True, False])
def test_a_name_that_only_some_installations_have(world, defined):
    """Where upstream's try block has failed the factory gets nothing, else what is there."""
    guarded = "try:\n    import {}\n\n    def maybe(x):\n        return x\n\nexcept ImportError:\n    pass\n"
    world.module("gated", guarded.format("sys" if defined else "no_such_module"))
    source = SOURCE.replace(
        "def plain(missing):", "def plain(missing):\n        if callable(missing): return missing\n"
    )
    world.patch("p", [(CORE + "gated:maybe", ADDED)], source)
    before = world.get("gated:maybe")
    assert shim.apply()["p"].state == "applied"
    assert world.get("gated:maybe")(2) == (2 if defined else ("p", 6, "MISSING"))
    shim.revert()
    assert world.get("gated:maybe") is before


def test_what_stood_there_at_first_binds_nobody(world):
    """A release that may lack a name does not say what it is to hold: None first, then a function."""
    world.module("gated", "try:\n    import no_such_module as maybe\nexcept ImportError:\n    pass\n")
    source = SOURCE.replace(
        "def plain(missing):", "def plain(missing):\n        if callable(missing): return missing\n"
    )
    world.patch("p", [(CORE + "gated:maybe", ADDED)], source)
    world.get("gated:maybe")
    for theirs in (None, print):
        sys.modules[CORE + "gated"].maybe = theirs
        assert shim.apply()["p"].state == "applied"
        shim.revert()
        assert world.get("gated:maybe") is theirs


def test_a_class_that_is_gone_is_drifted(adding):
    adding.module("layers", "Layer = 1\n".replace("Layer", "Other"))
    assert "has no Layer.name" in shim.plan()["p"].reason


def test_what_somebody_else_put_there_is_left_alone(adding):
    adding.get("ops:double")
    sys.modules[CORE + "ops"].triple = theirs = lambda x: x
    report = shim.apply()
    assert report["p"].state == "conflict"
    assert "which the release lacks, holds" in report["p"].reason
    assert adding.get("ops:triple") is theirs
    assert not hasattr(adding.get("layers:Layer"), "name")


def test_what_somebody_else_puts_over_it_is_left_alone(adding):
    shim.apply()
    adding.get("ops:triple"), adding.get("layers:Layer")
    adding.set("ops:triple", theirs := lambda x: x)
    assert shim.revert().lost
    assert adding.get("ops:triple") is theirs


def test_explain_says_that_it_is_added(adding):
    assert "adds megatron.core.ops:triple" in shim.explain("p")


NOTHING = """
    def bindings(variant, options):
        return {target: lambda missing: None for target in TARGETS}
    """


def test_a_none_that_was_replaced_and_put_back_is_shims_again(world, monkeypatch):
    """As a test does that sets a name and undoes it. None has no identity by which shim could know it elsewhere."""
    world.patch("p", [(CORE + "ops:triple", ADDED)], NOTHING)
    shim.apply()
    assert world.get("ops:triple") is None
    ops = sys.modules[CORE + "ops"]
    with monkeypatch.context() as undo:
        undo.setattr(ops, "triple", object())
        assert shim.status()["p"].state == "conflict"
    assert shim.status()["p"].state == "applied"
    shim.revert()
    assert not hasattr(ops, "triple")


def test_an_added_module_is_known_as_shims(world):
    """Whoever puts it back after revert(), as a test that undoes its own patch does, finds it taken away again."""
    source = """
    import types

    EXTRA = types.ModuleType("megatron.core.ops.extra")


    def bindings(variant, options):
        return {TARGETS[0]: lambda missing: EXTRA}
    """
    world.patch("p", [(CORE + "ops:extra", ADDED)], source)
    shim.apply()
    extra = world.get("ops:extra")
    assert type(extra) is type(sys)
    owner = sys.modules[CORE + "ops"]
    owner.extra = None
    shim.revert()
    owner.extra = extra
    shim.status()
    assert not hasattr(owner, "extra")
