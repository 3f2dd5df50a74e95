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
    assert "has a triple of its own by now" in decision.reason


def test_a_class_that_is_gone_is_drifted(adding):
    adding.module("layers", "Layer = 1\n".replace("Layer", "Other"))
    assert "has no class Layer" in shim.plan()["p"].reason


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
