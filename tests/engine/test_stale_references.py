"""apply() after a model was built: what the model took of upstream's functions by then is named."""

import functools
import types

import pytest
from fake_world import Model

import shim

TARGET = "megatron.core.ops:double"


class Config:
    pass


@pytest.fixture
def model(patched_world):
    """Built, but without a function of upstream's so far."""
    patched_world.get("users:Holder")
    module = patched_world.get("layers:Layer")()
    module.config = Config()
    return Model(module, patched_world.get("layers:Layer")())


@pytest.mark.parametrize("take", [lambda function: function, lambda function: functools.partial(function, scale=3)])
def test_a_function_in_the_config_is_named(patched_world, model, take, caplog):
    """Nobody knows whether it is called. So it is a warning, and no error."""
    model.inner[0].config.call = take(patched_world.get("ops:double"))
    shim.apply(require=["count"])
    found = shim.check(model)["count"]
    assert found.state == "unknown"
    assert "config.call" in found.reason and "double" in found.reason and "shim.apply() before" in found.remedy
    assert [record for record in caplog.records if record.levelname == "WARNING"]
    # The remedy, followed.
    model.inner[0].config.call = take(patched_world.get("ops:double"))
    assert shim.check(model)["count"].state == "applied"


def test_a_function_in_a_module_is_named(patched_world, model):
    model.inner[1].call = patched_world.get("ops:double")
    shim.apply()
    assert "call of megatron.core.layers.Layer" in shim.check(model)["count"].reason


def test_what_was_taken_while_applied_or_is_no_target_is_fine(patched_world, model):
    model.inner[0].config.halve = patched_world.get("ops:halve")
    shim.apply()
    model.inner[0].config.call = patched_world.get("ops:double")
    assert shim.check(model)["count"].state == "applied"


def test_a_method_that_is_kept_to_be_put_back_is_no_problem(patched_world, model):
    layer = model.inner[0]
    layer.forward_backup = types.MethodType(type(layer).forward, layer)
    shim.apply()
    assert shim.check(model)["count"].state == "applied"
