"""config-override on a real release: a recompute sees the config that its forward pass saw."""

import contextlib
import threading

import moe_cases
import pytest
import torch
from megatron.core.tensor_parallel import random
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import shim
from shim import testing
from shim.patches._proof_config_override import toggled
from shim.patches.megatron_core.config_override.proof import FULL
from shim.testing.patience import patience

CELLS = {"0.12.0": "all"}

ID = "config-override"
WITHOUT_TE = "fp8-fp4-recompute"  # CheckpointWithoutOutput raises without Transformer Engine, but for this patch


class Config:
    factor = 3.0


@pytest.fixture(autouse=True)
def one_rank():
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


def managed(function, x):
    manager = random.CheckpointWithoutOutputManager()
    checkpoint = random.CheckpointWithoutOutput(ckpt_manager=manager, retain_input_tensors=True)
    result = checkpoint.checkpoint(function, x) * 1.0
    manager.discard_all_outputs_and_register_unified_recompute(result)
    return result


def by_torch(function, x):
    return torch_checkpoint(function, x, use_reentrant=False)


def by_torch_reentrant(function, x):
    return torch_checkpoint(function, x, use_reentrant=True)


CHECKPOINTS = [by_megatron, without_output, by_torch, by_torch_reentrant]
if hasattr(random, "CheckpointWithoutOutputManager"):  # from 0.20
    CHECKPOINTS.append(managed)
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


def no_override(config, factor):
    return contextlib.nullcontext()


@of_each_checkpoint
def test_what_ran_outside_is_recomputed_without(checkpoint, applied):
    """Backward inside of an override does not reach into what ran before it."""
    assert gradient(checkpoint, no_override, another_value) == (6.0, [3.0, 3.0])


@of_each_checkpoint
def test_an_assignment_inside_holds_in_the_recompute(checkpoint, applied):
    """And afterwards the config holds what was assigned last."""
    config, x = Config(), torch.ones((), requires_grad=True)
    with shim.config_override(config, factor=5.0):
        config.factor = 7.0
        result = checkpoint(lambda x: config.factor * x * x, x)
        config.factor = 8.0
        result.backward()
        assert (x.grad.item(), config.factor) == (14.0, 8.0)
    assert vars(config) == {} and config.factor == 3.0


class Deep(torch.autograd.Function):
    """Its backward runs `innermost` below so many backwards that autograd takes a thread of its own."""

    @staticmethod
    def forward(ctx, x, depth, innermost):
        ctx.depth, ctx.innermost = depth, innermost
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth:
            with torch.enable_grad():
                Deep.apply(torch.ones((), requires_grad=True), ctx.depth - 1, ctx.innermost).backward()
        else:
            ctx.innermost()
        return grad, None, None


@pytest.mark.no_fork_after
@of_each_checkpoint
def test_a_thread_of_autograd_runs_for_its_caller(checkpoint, applied):
    """As backward on a GPU does: the override of the thread that waits for it is none of another thread's."""
    config, threads, x = Config(), [], torch.ones((), requires_grad=True)

    def run(x):
        threads.append(threading.get_ident())
        return config.factor * x * x

    outside = checkpoint(run, x)
    deep = Deep.apply(torch.ones((), requires_grad=True), 70, outside.backward)
    with shim.config_override(config, factor=9.0):
        deep.backward()
        assert config.factor == 9.0
    assert threads[0] != threads[1] and x.grad.item() == 6.0


@of_each_checkpoint
def test_an_override_that_another_thread_enters_during_a_recompute_is_refused(checkpoint, applied):
    config, x, inside, leave = Config(), torch.ones((), requires_grad=True), threading.Event(), threading.Event()

    def run(x):
        if torch.is_grad_enabled() and first:
            inside.set()
            assert leave.wait(patience())
        first.append(1)
        return config.factor * x * x

    first = []
    result = checkpoint(run, x)
    thread = threading.Thread(target=result.backward)
    thread.start()
    assert inside.wait(patience())
    try:
        with pytest.raises(shim.OptionError, match="recomputing"), shim.config_override(config, factor=9.0):
            raise AssertionError
        with shim.config_override(Config(), factor=9.0):  # one of its own
            pass
    finally:
        leave.set()
        thread.join()
    assert x.grad.item() == 6.0


def test_autograd_holds_no_object_for_a_thread(monkeypatch, applied):
    """It is freed when the thread ends: where the interpreter is ending meanwhile, the process aborts (1 in 4 runs)."""
    stashed = []
    monkeypatch.setattr(torch._C, "_stash_obj_in_tls", lambda key, value: stashed.append(key))
    gradient(by_torch, shim.config_override)
    assert not any("shim" in key for key in stashed)


def test_tensors_are_compared_by_identity(applied):
    """What == says of them is no answer; one that was changed in place is refused in the recompute."""
    config, value, x = Config(), torch.tensor([2.0, 3.0]), torch.ones(2, requires_grad=True)
    with shim.config_override(config, factor=value):
        with shim.config_override(config, factor=torch.tensor([4.0, 5.0])):
            result = by_megatron(lambda x: config.factor * x * x, x).sum()
        changed = by_megatron(lambda x: config.factor * x * x, x).sum()
    result.backward()
    assert x.grad.tolist() == [8.0, 10.0] and config.factor == 3.0
    value.add_(1.0)
    with pytest.raises(shim.OptionError, match="changed in place"):
        changed.backward()


def test_checkpoints_keep_the_very_function(applied):
    def run(x):
        return 2 * x

    result = by_megatron(run, torch.ones((), requires_grad=True))
    assert result.grad_fn.run_function is run


def test_without_the_patch_it_is_refused():
    with pytest.raises(shim.NotMetError, match=ID):
        gradient(by_megatron, shim.config_override)


def test_nothing_is_left_in_torch(applied):
    module = torch.utils.checkpoint
    watched = ((module.CheckpointFunction._backward_cls, "run_function"), (module._CheckpointFrame, "recompute_fn"))
    with shim.config_override(Config(), factor=1.0):
        assert all(name in vars(owner) for owner, name in watched)
        (held,) = shim.status()[ID].holds
        assert "shim.config_override is entered (factor)" in held
    assert shim.status()[ID].holds == ()
    assert not any(name in vars(owner) for owner, name in watched)


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


SHARED_EXPERTS = {**moe_cases.DROPLESS, "moe_shared_expert_intermediate_size": 24, "bias_activation_fusion": False}


def configs_of(model):
    """By place; shared experts have a copy on every release."""
    found = {name: module.config for name, module in model.named_modules() if hasattr(module, "config")}
    assert any(config is not model.config for config in found.values())
    return found


def test_a_model_given_its_copies_follow(applied):
    """Given its config alone they do not: shared experts would run without what was asked for."""
    model = moe_cases.build(**SHARED_EXPERTS)
    for target in (model, [model], torch.nn.parallel.DataParallel(model)):
        with shim.config_override(target, activation_func=torch.tanh):
            assert {config.activation_func for config in configs_of(model).values()} == {torch.tanh}
    with shim.config_override(model.config, activation_func=torch.tanh):
        assert len({config.activation_func for config in configs_of(model).values()}) == 2
    assert torch.tanh not in {config.activation_func for config in configs_of(model).values()}


def test_a_copy_that_was_made_different_keeps_its_value_and_is_named(applied, caplog):
    model = moe_cases.build(**SHARED_EXPERTS)
    shared = next(module for name, module in model.named_modules() if name.endswith("shared_experts"))
    with shim.config_override(model, ffn_hidden_size=8):
        assert model.config.ffn_hidden_size == 8 and shared.config.ffn_hidden_size == 24
    assert "shared_experts" in caplog.text and "'ffn_hidden_size' stays 24" in caplog.text


def test_copies_follow_in_the_recompute(applied):
    """Bit for bit the gradients of a model whose every config was set for good; its config alone gives others."""
    field = "activation_func_clamp_value"
    if not hasattr(moe_cases.build(**SHARED_EXPERTS).config, field):
        pytest.skip("no field that shared experts read in every call")

    def grads(override, **recompute):
        model = moe_cases.build(**SHARED_EXPERTS, **recompute)
        ids = torch.arange(12)[None]
        with override(model):
            output = model(input_ids=ids, position_ids=ids, attention_mask=None)
        output.square().sum().backward()
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    def for_good(model):
        for config in configs_of(model).values():
            setattr(config, field, 0.01)
        return contextlib.nullcontext()

    plain = grads(for_good)
    assert equal(grads(lambda model: shim.config_override(model, **{field: 0.01}), **FULL), plain)
    assert not equal(grads(lambda model: shim.config_override(model.config, **{field: 0.01}), **FULL), plain)
