"""te-config-override: a checkpoint of Transformer Engine is recomputed with the config of its forward pass."""

import contextlib

import pytest
import torch
from transformer_engine.pytorch import distributed

import shim

IDS = ["te-config-override", "config-override"]


class Config:
    factor = 3.0


class Scaled(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.seen = config, []

    def forward(self, x):
        self.seen.append(self.config.factor)
        return self.config.factor * x * x


@contextlib.contextmanager
def toggled(config, **fields):
    vars(config).update(fields)
    try:
        yield
    finally:
        vars(config).clear()


def gradient(override, as_function):
    module = Scaled(Config())
    x = torch.ones((), requires_grad=True)
    with override(module.config, factor=5.0):
        # A module without one of theirs is left to torch.utils.checkpoint.
        result = distributed.checkpoint((lambda *given: module(*given)) if as_function else module, x)
    result.backward()
    return x.grad.item(), module.seen


@pytest.mark.parametrize("as_function", [True, False], ids=["function", "module"])
def test_a_plain_toggle_is_recomputed_with_the_other_value(as_function):
    assert gradient(toggled, as_function) == (6.0, [5.0, 3.0])


@pytest.mark.parametrize("as_function", [True, False], ids=["function", "module"])
def test_an_override_holds_in_the_recompute(as_function):
    with shim.patched(only=IDS, require=IDS) as report:
        assert report[IDS[0]].state == "applied", str(report)
        assert gradient(shim.config_override, as_function) == (10.0, [5.0, 5.0])


def test_without_the_patch_it_is_refused():
    with shim.patched(only=IDS[1:]), pytest.raises(shim.NotMetError, match=IDS[0]):
        gradient(shim.config_override, True)
