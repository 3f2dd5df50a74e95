"""What others read of functions that shim wraps, with Transformer Engine; without it see tests/cells."""

import contextlib

import megatron.core.transformer.multi_token_prediction as mtp
import pytest
import torch
import transformer_engine.pytorch as te
from contract_cases import Watched, broken_contracts, import_targets
from megatron.core import tensor_parallel
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch import distributed

import shim
from shim import testing
from shim.testing import Layout

CELLS = {"0.12.0+2.2.0": "all", "0.19.2+2.20.2": "all"}

TARGETS = import_targets(shim.plan())


@pytest.fixture(scope="module")
def applied():
    with shim.patched() as report:
        yield report


@pytest.fixture(scope="module")
def one_rank():
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout()):
        yield


@pytest.mark.parametrize("target", TARGETS)
def test_what_others_read_of_a_function_stays(applied, target):
    assert broken_contracts(target) == []


def region(**how):
    if hasattr(te, "autocast"):  # from 2.9
        return te.autocast(recipe=DelayedScaling(), **how)
    return te.fp8_autocast(fp8_recipe=DelayedScaling(), **how)


class Layer(mtp.MultiTokenPredictionLayer):
    """One that can be had without a model, whose modules would need a GPU inside a region."""

    def __init__(self):
        torch.nn.Module.__init__(self)


@pytest.mark.parametrize("override", [False, True], ids=["", "override"])
@pytest.mark.parametrize("enabled", [True, False], ids=["quantizing", "calibrating"])
def test_the_cells_of_a_function_stay_in_sight_inside_a_region(one_rank, applied, monkeypatch, enabled, override):
    """A checkpoint keeps the function together with the region. Trainers look for an MTP layer among its cells."""
    layer, config = Layer(), type("Config", (), {"factor": 2.0})()

    def run(value):
        _ = layer
        return value * config.factor

    watched = Watched(monkeypatch)
    value = torch.ones(2, requires_grad=True)
    context = shim.config_override(config, factor=3.0) if override else contextlib.nullcontext()
    with context, region(enabled=enabled, calibrating=not enabled):
        result = tensor_parallel.checkpoint(run, False, value)
    result.sum().backward()
    assert watched.layers() == [layer] and watched.functions[0] is not run
    assert torch.equal(value.grad, torch.full((2,), 3.0 if override else 2.0))


def test_checkpoints_of_transformer_engine_keep_the_very_function(applied, monkeypatch):
    def double(value):
        return value * 2

    watched = Watched(monkeypatch, distributed._CheckpointFunction)
    value = torch.ones(2, requires_grad=True)
    distributed.checkpoint(double, value, use_reentrant=True).sum().backward()
    assert watched.functions == [double]
