"""Patch fp8-fp4-recompute without Transformer Engine: recompute works, and where stock is right no bit changes."""

from importlib.util import find_spec

import fork_server
import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import CheckpointFunction, CheckpointWithoutOutput

import shim
from shim import testing
from shim.patches.megatron_core.mtp_recompute.proof import OneSequence

CELLS = {"0.14.0": "all"}

pytestmark = pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="tests/pairs is about that")

ID = "fp8-fp4-recompute"
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
NEEDS_TE = VERSION >= (0, 13)  # stock, for CheckpointWithoutOutput

needs_te = pytest.mark.skipif(not NEEDS_TE, reason="0.12 keeps no FP8 books")


@pytest.fixture
def applied():
    with shim.patched(only=[ID], require=[ID]) as report:
        assert report[ID].state == "applied", str(report)
        yield report


class Probe(torch.nn.Module):
    """A linear layer with dropout that counts its calls, by whether gradients are on."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout, self.calls = torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), []

    def forward(self, values):
        self.calls.append(torch.is_grad_enabled())
        return self.dropout(self.linear(values))


def result_of(probe, run, values, seed=3):
    """What a step gives, to the bit: [output, gradient of the input, gradients of the weights]."""
    probe.zero_grad(set_to_none=True)
    given = values.clone().requires_grad_()
    torch.manual_seed(seed)
    output = run(given)
    kept = output.detach().clone()
    torch.rand(7)  # backward finds another random state than the forward pass did
    output.sum().backward()
    return [kept, given.grad, *(weight.grad for weight in probe.parameters())]


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


# CheckpointWithoutOutput


def without_output(probe, given):
    checkpoint = CheckpointWithoutOutput()
    output = checkpoint.checkpoint(probe, given)
    result = output.sin()  # keeps its input for backward, which is discarded until then
    checkpoint.discard_output_and_register_recompute(result)
    assert output.untyped_storage().size() == 0
    return result


def managed(probe, given):
    """Two in a row, from 0.20: a manager discards both outputs, and recomputes both in one hook."""
    manager = random.CheckpointWithoutOutputManager()
    first, second = (CheckpointWithoutOutput(ckpt_manager=manager) for _ in range(2))
    middle = first.checkpoint(torch.cos, given)
    output = second.checkpoint(probe, middle)
    result = output.sin()
    manager.discard_all_outputs_and_register_unified_recompute(result)
    assert middle.untyped_storage().size() == output.untyped_storage().size() == 0
    return result


def retaining(probe, given):
    """From 0.20: an output that shares the memory of an input stays, and an argument need not be a tensor."""
    checkpoint = CheckpointWithoutOutput(retain_input_tensors=True)
    shared, output = checkpoint.checkpoint(lambda x, factor: (x.view(-1), probe(x * factor)), given * 1, 0.5)
    result = output.sin() + shared.view(3, 4).exp()
    checkpoint.discard_output_and_register_recompute(result)
    assert output.untyped_storage().size() == 0 and shared.untyped_storage().size() > 0
    return result


# What runs under a checkpoint, and the same without one.
KINDS = {without_output: lambda probe, given: probe(given).sin()}
if hasattr(random, "CheckpointWithoutOutputManager"):
    KINDS[managed] = lambda probe, given: probe(given.cos()).sin()
    KINDS[retaining] = lambda probe, given: probe(given * 0.5).sin() + given.exp()


@needs_te
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_stock_fails_without_transformer_engine(kind):
    with pytest.raises(NameError, match="FP8GlobalStateManager"):
        kind(Probe(), torch.randn(3, 4, requires_grad=True))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_without_output_everything_equals_the_plain_function(kind, applied, one_rank):
    probe, values = Probe(), torch.randn(3, 4)
    plain = result_of(probe, lambda given: KINDS[kind](probe, given), values)
    assert probe.calls == [True]
    assert same(result_of(probe, lambda given: kind(probe, given), values), plain)
    assert probe.calls == [True, False, True]
    assert len(plain) == 4 and all(value.abs().max() > 0 for value in plain)


@pytest.mark.skipif(VERSION > (0, 15), reason="guarded upstream from 0.16")
def test_without_a_forward_pass_there_is_nothing_to_recompute():
    with pytest.raises(AttributeError):
        CheckpointWithoutOutput()._recompute(None)
    with shim.patched(only=[ID], require=[ID]):
        assert CheckpointWithoutOutput()._recompute(None) is None


@needs_te
@pytest.mark.parametrize("argument", [False, True, None])
def test_no_fp8_books_are_kept(applied, argument):
    assert CheckpointWithoutOutput(fp8=argument).fp8 is False


def trained(**config):
    row = OneSequence(**vars(testing.pack(testing.random_sequences((9,)))))
    return testing.run_packed(testing.build_gpt(mtp_num_layers=None, **config), row)


@needs_te
def test_a_model_trains_with_selective_recompute(one_rank, monkeypatch):
    """Of norms, which discard their output. The other modules that do (moe_act, mla_up_proj) need TE's layers."""
    config = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    plain = trained()
    with pytest.raises(NameError, match="FP8GlobalStateManager"):
        trained(**config)
    checkpoints = []
    original = CheckpointWithoutOutput._recompute
    with shim.patched(only=[ID], require=[ID]):
        monkeypatch.setattr(
            CheckpointWithoutOutput, "_recompute", lambda self, _: checkpoints.append(self) or original(self, _)
        )
        result = trained(**config)
        monkeypatch.undo()
    assert len(checkpoints) == 4  # two norms in each of two layers
    assert torch.equal(plain.main, result.main) and plain.grads.keys() == result.grads.keys()
    assert all(torch.equal(plain.grads[name], result.grads[name]) for name in plain.grads)


# tensor_parallel.checkpoint


def test_a_checkpoint_is_the_same_to_the_bit(one_rank):
    probe, values = Probe(), torch.randn(3, 4)
    run = lambda given: tensor_parallel.checkpoint(probe, False, given)  # noqa: E731
    plain, stock = result_of(probe, probe, values), result_of(probe, run, values)
    with shim.patched(only=[ID], require=[ID]):
        shimmed = result_of(probe, run, values)
    assert same(stock, plain) and same(shimmed, plain)
    assert probe.calls == [True, False, True, False, True]
    # Without dropout's random states restored, this would differ.
    assert not same(result_of(probe, probe, values, seed=4), plain)


def test_the_function_itself_is_handed_on(applied, one_rank):
    probe = Probe()
    output = tensor_parallel.checkpoint(probe, False, torch.randn(3, 4, requires_grad=True))
    assert output.grad_fn.run_function is probe


# The engine on a real release


def test_applying_imports_no_transformer_engine():
    """In a process of its own, with something that is found under that name but must not be looked at."""
    code = """
import sys
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformer_engine":
            asked.append(name)
asked = []
sys.meta_path.insert(0, Refusing())
import megatron.core.tensor_parallel.random, megatron.core.transformer.transformer_block
asked.clear()
import shim
assert shim.apply(only=["fp8-fp4-recompute"], require=["fp8-fp4-recompute"])["fp8-fp4-recompute"].state == "applied"
from megatron.core import tensor_parallel
import torch
from shim import testing
with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout()):
    tensor_parallel.checkpoint(torch.sin, False, torch.ones(2, requires_grad=True)).sum().backward()
found = [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]
assert not found and not [name for name in asked if name != "transformer_engine"], (found, asked)
"""
    done = fork_server.run(code, share_loaded=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_revert_gives_back_the_same_objects():
    owners = [CheckpointFunction, CheckpointWithoutOutput]
    before = [dict(vars(owner)) for owner in owners]
    with shim.patched(only=[ID], require=[ID]) as report:
        changed = [name for owner, was in zip(owners, before) for name in was if vars(owner)[name] is not was[name]]
        elsewhere = [
            t for t in report[ID].targets if t.endswith((":checkpoint", "TransformerBlock._checkpointed_forward"))
        ]
    assert changed and len(changed) + len(elsewhere) == len(report[ID].targets)
    assert all(vars(owner)[name] is value for owner, was in zip(owners, before) for name, value in was.items())
