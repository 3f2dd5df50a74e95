"""What is said of a patch whose module is still being imported."""

import importlib
import sys

import shim

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
