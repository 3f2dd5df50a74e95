"""checkpoint-without-grad: outputs of a recompute that require no gradient take none, and all others train as ever."""

import contextlib

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random

import shim
from shim import testing
from shim.patches.megatron_core._proof_recompute import NORMS
from shim.patches.megatron_core.checkpoint_without_grad.proof import UNIFORM

CELLS = {"0.12.0": "all"}
pytestmark = pytest.mark.usefixtures("one_rank")

ID, QUANTIZED = "checkpoint-without-grad", "fp8-fp4-recompute"


def patched():
    return shim.patched(only=[ID, QUANTIZED], require=[ID])


def leaf(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).requires_grad_()


def backward(function, *inputs, recompute=True):
    """The gradients of `inputs` in a step, None where there is none. `function` returns a tuple."""
    for tensor in inputs:
        tensor.grad = None
    outputs = tensor_parallel.checkpoint(function, False, *inputs) if recompute else function(*inputs)
    # What comes from outside has a gradient of its own, so that a step without recompute has one at all.
    outside = torch.ones((), requires_grad=True)
    (sum(output.sum() for output in outputs if torch.is_tensor(output)) * outside).backward()
    return [tensor.grad for tensor in inputs]


def same(found, right):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(found, right, strict=True))


FUNCTIONS = {
    "detached": lambda a, b: (a.detach() * 2, b.detach()),
    "constant": lambda a, b: (torch.ones(3),),
    "numbers first": lambda a, b: (torch.arange(3), None, a.detach()),
    "some": lambda a, b: (a.detach(), b * 2, None, torch.arange(2)),
    "all": lambda a, b: (a * 2, b.sin()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_without_recompute(name):
    a, b = leaf(3, 4), leaf(3, 4)
    right = backward(FUNCTIONS[name], a, b, recompute=False)
    with patched():
        assert same(backward(FUNCTIONS[name], a, b), right)


def test_a_single_tensor():
    a = leaf(3)
    with patched():
        output = tensor_parallel.checkpoint(lambda a: a.detach() * 2, False, a)
        output.sum().backward()
    assert a.grad is None


def test_nothing_is_left_behind_after_a_step_or_an_error():
    """Neither in upstream's flags nor in the context, whose function trainers look at."""

    def fails(a):
        if torch.is_grad_enabled():
            raise KeyError("inside")
        return a * 2

    seen = []
    with patched():
        for function in (lambda a: a.detach(), fails):
            output = tensor_parallel.checkpoint(function, False, leaf(3))
            node = output.grad_fn
            with pytest.raises(KeyError, match="inside") if function is fails else contextlib.nullcontext():
                output.sum().backward()
            seen.append(getattr(node.run_function, "__wrapped__", node.run_function) is function)
            if hasattr(random, "is_checkpointing") and function is not fails:
                assert not random.is_checkpointing()
    assert all(seen)


def test_the_same_call_of_upstream_where_all_outputs_require_a_gradient(monkeypatch):
    """It gets the outputs as they are, and the gradients as they are."""
    seen = []
    run = torch.autograd.backward

    def backward_of(outputs, *grads, **options):
        if isinstance(outputs, tuple):  # a checkpoint's, and not the loss
            seen.append(len(outputs))
        return run(outputs, *grads, **options)

    monkeypatch.setattr(torch.autograd, "backward", backward_of)
    a, b = leaf(3), leaf(3)
    with patched():
        backward(FUNCTIONS["all"], a, b)
        backward(FUNCTIONS["some"], a, b)
    assert seen == [2, 1]


@pytest.mark.parametrize("options", [UNIFORM, NORMS], ids=["layers", "norms"])
def test_models_train_as_on_stock(options):
    """Whose recomputed outputs all require a gradient; with adapters behind embeddings that do."""

    def gradients():
        model = testing.build_gpt(mtp_num_layers=None, **options)
        testing.add_lora(model)
        model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
        return testing.run_packed(model, testing.pack(testing.random_sequences((5, 7)))).grads

    with shim.patched(only=[QUANTIZED]):
        right = gradients()
    with patched():
        found = gradients()
    assert right.keys() == found.keys()
    assert all(torch.equal(found[name], right[name]) for name in right)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
def test_a_checkpoint_without_output_takes_gradients_for_what_has_one(wanted):
    def up(a, b):
        return a * 2, b * 3

    def step(recompute):
        a, b = (leaf(4).detach().requires_grad_(wants) for wants in wanted)
        checkpoint = random.CheckpointWithoutOutput()
        one, other = checkpoint.checkpoint(up, a, b) if recompute else up(a, b)
        product = one.sin() * other
        if recompute:
            checkpoint.discard_output_and_register_recompute(product)
        product.square().sum().backward()
        return [a.grad, b.grad]

    with patched():
        assert same(step(True), step(False))


def test_a_checkpoint_without_output_of_which_nothing_requires_a_gradient():
    """Inside everything is detached, although an input requires a gradient."""
    a, weight = leaf(4), leaf(4)
    with patched():
        checkpoint = random.CheckpointWithoutOutput()
        output = checkpoint.checkpoint(lambda a: a.detach() * 2, a)
        product = output * weight
        checkpoint.discard_output_and_register_recompute(product)
        product.sum().backward()
    assert a.grad is None
    assert torch.equal(weight.grad, a.detach() * 2)
