"""check(model) and status() say the same about the model that was checked last."""

import gc
import sys
import weakref

import pytest
from fake_world import Model

import shim

CORE = "megatron.core."


@pytest.fixture
def applied(patched_world):
    patched_world.get("layers:Layer"), patched_world.get("ops:double")
    shim.apply()
    return patched_world


def overriding(world):
    class Mine(world.get("layers:Layer")):
        def forward(self, x):
            return x

    return Mine


def states():
    """What status() and check() say, which must be the same."""
    said = shim.status()["count"]
    assert said == shim.check()["count"]
    return said.state


def test_status_says_what_check_found(applied):
    model = Model(overriding(applied)())
    found = shim.check(model)["count"]
    assert found.state == "shadowed"
    assert shim.status()["count"] == found
    assert "count" not in shim.status().applied and states() == "shadowed"


def test_an_override_that_is_gone_is_gone(applied):
    layer = applied.get("layers:Layer")()
    own = layer.forward = lambda x: x
    model = Model(layer)
    assert shim.check(model)["count"].state == states() == "shadowed"
    del layer.forward
    assert states() == "applied"
    layer.forward = own
    assert shim.status()["count"].state == "unknown"  # each check() tries anew: what an override calls may have changed
    assert shim.check()["count"].state == states() == "shadowed"


def test_only_check_tries_an_override(applied):
    """A report may be made while another thread trains. Until check() has tried an override, nothing is known of it."""
    layer = applied.get("layers:Layer")()
    model = Model(layer)
    shim.check(model)
    layer.forward = lambda x: x
    found = shim.status()["count"]
    assert found.state == "unknown" and "has not tested yet" in found.reason
    assert shim.check()["count"].state == shim.status()["count"].state == "shadowed"


def test_the_last_model_counts(applied):
    shadowed, fine = Model(overriding(applied)()), Model(applied.get("layers:Layer")())
    shim.check([fine, shadowed])
    assert states() == "shadowed"
    shim.check(fine)
    assert states() == "applied"


def test_no_model_is_kept_alive(applied):
    model = Model(overriding(applied)())
    shim.check(iter([model]))
    reference = weakref.ref(model)
    assert states() == "shadowed"
    del model
    gc.collect()
    assert reference() is None and states() == "applied"


def test_another_plan_is_looked_at_with_the_same_model(applied):
    """Until nothing is in force any more: what is applied anew was not checked."""
    applied.patch("other", [CORE + "layers:Layer.make"])
    model = Model(overriding(applied)())
    shim.check(model)
    assert shim.apply()["count"].state == "shadowed"
    assert shim.apply(only=["other"])["other"].state == "applied"
    assert shim.apply()["count"].state == "shadowed"
    shim.revert()
    assert shim.apply()["count"].state == "applied"


def test_what_a_patch_itself_finds_is_said_too(applied):
    """Also where it finds an error, which only check() raises."""
    problems = [("the flag is off", "switch it on")]
    module = sys.modules["fake_patches.count"]
    module.problems = lambda models: list(problems)
    model = Model(applied.get("layers:Layer")())
    shim.check(model)
    assert states() == "inactive"
    problems.clear()
    assert states() == "applied"

    def raising(models):
        raise shim.OptionError("a size of 0 is no size")

    module.problems = raising
    with pytest.raises(shim.OptionError):
        shim.check()
    found = shim.status()["count"]
    assert (found.state, found.reason) == ("inactive", "a size of 0 is no size")
