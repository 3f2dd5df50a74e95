"""config-override on a real release: a recompute sees the config that its forward pass saw."""

import contextlib

import pytest
import torch
from megatron.core.tensor_parallel import random
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import shim
from shim import testing

ID = "config-override"
WITHOUT_TE = "fp8-fp4-recompute"  # CheckpointWithoutOutput raises without Transformer Engine, but for this patch
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class Config:
    factor = 3.0


@contextlib.contextmanager
def toggled(config, **fields):
    """What a trainer writes without shim."""
    before = {name: getattr(config, name) for name in fields}
    vars(config).update(fields)
    try:
        yield
    finally:
        vars(config).update(before)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    def share(output, recomputed):
        output.untyped_storage().resize_(recomputed.untyped_storage().size())
        output.untyped_storage().copy_(recomputed.untyped_storage())

    if hasattr(random, "_get_share_storage"):  # from 0.17 in C++, which is compiled on first use, for half a minute
        monkeypatch.setattr(random, "_get_share_storage", lambda: share)
    with testing.layout_initialised(testing.Layout()):
        random.model_parallel_cuda_manual_seed(1)
        yield


@pytest.fixture
def applied():
    with shim.patched(only=[ID, WITHOUT_TE], require=[ID]) as report:
        assert report[ID].state == "applied", str(report)
        yield


def by_megatron(function, x):
    return random.checkpoint(function, False, x)


def without_output(function, x):
    checkpoint = random.CheckpointWithoutOutput()
    states = checkpoint.checkpoint(function, x)
    result = states * 1.0
    checkpoint.discard_output_and_register_recompute(result)
    return result


def by_torch(function, x):
    return torch_checkpoint(function, x, use_reentrant=False)


def by_torch_reentrant(function, x):
    return torch_checkpoint(function, x, use_reentrant=True)


CHECKPOINTS = [by_megatron, without_output, by_torch, by_torch_reentrant]
of_each_checkpoint = pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda function: function.__name__)


def gradient(checkpoint, override, around_backward=contextlib.nullcontext):
    """Of factor * x**2 at 1, run with factor 5 by `override`; what runs again reads the factor a second time."""
    config, seen = Config(), []

    def run(x):
        seen.append(config.factor)
        return config.factor * x * x

    x = torch.ones((), requires_grad=True)
    with override(config, factor=5.0):
        result = checkpoint(run, x)
    with around_backward(config):
        result.backward()
    assert config.factor == 3.0
    return x.grad.item(), seen


@of_each_checkpoint
def test_a_plain_toggle_is_recomputed_with_the_other_value(checkpoint):
    """The gradient is that of another function, and nothing says so."""
    with shim.patched(only=[WITHOUT_TE]):
        found, seen = gradient(checkpoint, toggled)
    assert seen == [5.0, 3.0] and found != 10.0


def another_value(config):
    return shim.config_override(config, factor=7.0)


@of_each_checkpoint
@pytest.mark.parametrize("around_backward", [contextlib.nullcontext, another_value], ids=["left", "another"])
def test_an_override_holds_in_the_recompute(checkpoint, around_backward, applied):
    """After it was left, and inside of another one."""
    assert gradient(checkpoint, shim.config_override, around_backward) == (10.0, [5.0, 5.0])


def test_what_ran_outside_is_recomputed_without(applied):
    """Backward inside of an override does not reach into what ran before it."""
    assert gradient(by_megatron, lambda config, factor: contextlib.nullcontext(), another_value) == (6.0, [3.0, 3.0])


def test_without_the_patch_it_is_refused():
    with pytest.raises(shim.NotMetError, match=ID):
        gradient(by_megatron, shim.config_override)


def test_nothing_is_left_in_torch(applied):
    forward, generator = torch.utils.checkpoint.CheckpointFunction.forward, "_checkpoint_without_reentrant_generator"
    before = getattr(torch.utils.checkpoint, generator)
    with shim.config_override(Config(), factor=1.0):
        assert torch.utils.checkpoint.CheckpointFunction.forward is not forward
    assert torch.utils.checkpoint.CheckpointFunction.forward is forward
    assert getattr(torch.utils.checkpoint, generator) is before


def gradients(override, **recompute):
    """Of a model that runs with interleaved rotations by `override`."""
    model = testing.build_gpt(mtp_num_layers=None, **recompute)
    ids = torch.arange(12)[None]
    with override(model.config, rotary_interleaved=True):
        output = model(input_ids=ids, position_ids=ids, attention_mask=None)
    (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_model_under_full_recompute(applied):
    """Bit for bit the gradients without recompute; those of the toggle are others."""
    plain = gradients(toggled)
    assert equal(gradients(shim.config_override, **FULL), plain)
    assert not equal(gradients(toggled, **FULL), plain)
