"""What is said of a patch whose module is still being imported."""

import importlib
import sys

import shim
from shim._engine import engine

CORE = "megatron.core."

ASKS = """
    import functools

    import megatron.core.layers
    import shim


    def look():
        report = shim.status()
        return {id: (report[id].state, report[id].targets.get("megatron.core.layers:Layer.forward")) for id in report}


    seen = look()


    def bindings(variant, options):
        def factory(original):
            return functools.wraps(original)(lambda *args, **kwargs: ("b", original(*args, **kwargs)))
        return dict.fromkeys(TARGETS, factory)
    """


def test_a_target_that_another_patch_has_bound_is_not_this_ones(world):
    """The module of `b` imports a target, on which `a` is bound at once, and asks: `b` is pending there."""
    world.patch("a", [CORE + "layers:Layer.forward"])
    world.patch("b", [CORE + "ops:double", CORE + "layers:Layer.forward"], ASKS)
    shim.apply()
    importlib.import_module(CORE + "ops")
    seen = sys.modules["fake_patches.b"].seen
    assert seen == {"a": ("applied", "bound"), "b": ("pending", "pending")}
    assert shim.status().applied == ("a", "b")
    assert world.get("layers:Layer")().forward(1) == ("b", ("a", 2))


def test_a_module_that_comes_between_the_search_for_conflicts_and_the_commit_is_bound(world, monkeypatch):
    """Another thread imports it: while importlib has it out of sys.modules for a moment, nothing is seen of it."""
    world.patch("a", [CORE + "ops:double"])
    importlib.import_module(CORE + "ops")
    search = engine.with_conflicts

    def without_the_module(*args):
        module = sys.modules.pop(CORE + "ops")
        try:
            return search(*args)
        finally:
            sys.modules[CORE + "ops"] = module

    with monkeypatch.context() as once:
        once.setattr(engine, "with_conflicts", without_the_module)
        shim.apply()
    assert shim.status()["a"].state == "applied"
    assert world.get("ops:double")(2) == ("a", 4)
    shim.revert()
    assert world.get("ops:double")(2) == 4
