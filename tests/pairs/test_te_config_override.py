"""te-config-override: a checkpoint of Transformer Engine is recomputed with the config of its forward pass."""

import contextlib

import pytest
import torch
from transformer_engine.pytorch import distributed

import shim
from shim.patches._proof_config_override import toggled

CELLS = {"0.12.0+2.2.0": "all"}

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


def gradient(override, kind, around_backward=contextlib.nullcontext):
    module = Scaled(Config())
    x = torch.ones((), requires_grad=True)
    with override(module.config, factor=5.0):
        # A module without one of theirs is left to torch.utils.checkpoint.
        function = module if kind == "module" else lambda *given: module(*given)
        result = distributed.checkpoint(function, x, use_reentrant=kind != "non-reentrant")
    with around_backward(module.config):
        result.backward()
    return x.grad.item(), module.seen


def another_value(config):
    return shim.config_override(config, factor=7.0)


def none(config, factor):
    return contextlib.nullcontext()


of_each_kind = pytest.mark.parametrize("kind", ["function", "non-reentrant", "module"])


@of_each_kind
def test_a_plain_toggle_is_recomputed_with_the_other_value(kind):
    """Without reentry part of what backward reads is from the forward pass, and the gradient is that of neither."""
    found, seen = gradient(toggled, kind)
    assert seen == [5.0, 3.0] and found == (8.0 if kind == "non-reentrant" else 6.0)


@of_each_kind
def test_an_override_holds_in_the_recompute(kind):
    with shim.patched(only=IDS, require=IDS) as report:
        assert report[IDS[0]].state == "applied", str(report)
        assert gradient(shim.config_override, kind) == (10.0, [5.0, 5.0])
        assert gradient(shim.config_override, kind, another_value) == (10.0, [5.0, 5.0])
        assert gradient(none, kind, another_value) == (6.0, [3.0, 3.0])


def test_without_the_patch_it_is_refused():
    with shim.patched(only=IDS[1:]), pytest.raises(shim.NotMetError, match=IDS[0]):
        gradient(shim.config_override, "function")
