"""Patch te-cross-entropy: every argument against fp64, memory, who reads the logits, ranks; where it is not there."""

import inspect

import pytest
import torch
from cross_entropy_cases import VOCABULARY, module, off, sample, smoothed_on_rank, truth
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine as extension

import shim
from shim import testing
from shim.patches.transformer_engine._proof_cross_entropy import cross_entropy

CELLS = {"0.12.0+2.2.0": "all"}

ID = "te-cross-entropy"
NEEDED = shim.plan()[ID].wanted
needed = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")
# 2.18 leaves the logits as they are; there test_te_cross_entropy_copy.py has the tests of who may read them.
overwrites = pytest.mark.skipif(
    not NEEDED or shim.plan()[ID].variant == "v2_18", reason="this release does not write over the logits"
)
BOUND = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


@pytest.fixture
def function():
    """The patched function, from where others take it."""
    import transformer_engine.pytorch as te

    with shim.patched(only=[ID], require=[ID]):
        yield te.parallel_cross_entropy


def ignore_idx_is_there():
    return "ignore_idx" in inspect.signature(module().CrossEntropyFunction.forward).parameters


@needed
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_values_and_gradients(function, dtype, reduce, transposed):
    logits, target, weights = sample(dtype)
    ignore = 7 if ignore_idx_is_there() else -100
    target[1, 2] = target[3, 0] = ignore
    if reduce:
        weights = torch.tensor(0.3)
    expected, right = truth(logits, target, weights, 0.1, ignore, reduce)
    leaf = logits.clone().requires_grad_()
    computed = leaf.transpose(0, 1).contiguous().transpose(0, 1) if transposed else leaf * 1
    found = function(computed, target, 0.1, reduce, None, *([ignore] if ignore != -100 else []))
    (gradient,) = torch.autograd.grad((found * weights).sum(), leaf)
    assert found.dtype == torch.float32 and gradient.dtype == dtype
    assert off(found, expected) < 1e-6 and off(gradient, right) < BOUND[dtype]


@needed
@pytest.mark.parametrize("reduce", [False, True])
def test_losses_are_those_of_stock(reduce):
    """Stock is wrong in gradients; its losses of tokens with a target are right, and so are their shapes."""
    logits, target, _ = sample()
    with cross_entropy("cpu") as stock:
        expected = stock(logits.clone(), target, 0.0, reduce)
    with shim.patched(only=[ID], require=[ID]):
        found = module().parallel_cross_entropy(logits, target, 0.0, reduce)
    assert found.shape == expected.shape
    assert off(found, expected.double()) < 1e-6


@needed
def test_megatron_core_reaches_it(function):
    """Its module has taken the function by name."""
    with testing.layout_initialised(testing.Layout()):
        logits, target, weights = sample(torch.bfloat16)
        _, right = truth(logits, target, weights)
        computed = logits.requires_grad_() * 1
        group = parallel_state.get_tensor_model_parallel_group()
        losses = extension.te_parallel_cross_entropy(computed, target, group)
        (gradient,) = torch.autograd.grad((losses * weights).sum(), computed)
    assert off(gradient, right) < BOUND[torch.bfloat16]


@overwrites
def test_memory(function):
    """Beyond the logits there is nothing of their size: the gradient is written over them, in backward."""
    logits = torch.randn(1024, 1, 1 << 13).bfloat16().requires_grad_() * 1
    target = torch.randint(0, 1 << 13, (1024, 1))
    with testing.Footprint() as footprint:
        (gradient,) = torch.autograd.grad(function(logits, target).sum(), logits)
    assert gradient.data_ptr() == logits.data_ptr()
    assert footprint.peak_bytes < 0.5 * logits.numel() * logits.element_size()


@overwrites
def test_logits_that_others_need(function):
    """They can be read until backward. Who needs them in backward gets an error instead of a wrong gradient."""
    logits, target, _ = sample()
    computed = logits.requires_grad_() * 1
    squares = computed.square().sum()
    losses = function(computed, target)
    assert torch.equal(computed, logits)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (losses.sum() + squares).backward()
    function(logits, target).sum().backward()  # a leaf
    assert off(logits.grad, truth(logits, target, torch.ones(4, 3))[1]) < 1e-6


@needed
def test_targets_outside_of_the_vocabulary(function):
    """A negative one is no target, one beyond the end is an error; the loss of stock was infinite."""
    logits, target, _ = sample()
    target[0, 0] = -1
    assert function(logits, target)[0, 0] == 0
    target[0, 0] = VOCABULARY
    with pytest.raises(ValueError, match="outside of the vocabulary"):
        function(logits, target)


@needed
def test_two_ranks(function):
    """Stock smooths over the columns of each rank alone, so that losses of ranks differ."""
    with testing.Ranks(2) as ranks:
        for errors in ranks.run(smoothed_on_rank):
            assert max(errors) < 1e-6
