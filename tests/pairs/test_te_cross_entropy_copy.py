"""te-cross-entropy-copy: as exact as stock, no copy of the logits, and who reads the logits reads them as on stock."""

import inspect
from unittest import mock

import pytest
import torch
from cross_entropy_cases import VOCABULARY, module, off, sample, smoothed_on_rank, truth
from megatron.core.extensions import transformer_engine as extension
from megatron.core.tensor_parallel import checkpoint

import shim
from shim import testing
from shim.patches.transformer_engine._proof_cross_entropy import cross_entropy
from shim.testing import build_gpt

CELLS = {"0.18.2+2.18.0": "all"}

ID = "te-cross-entropy-copy"
PLAN = shim.plan(rounding=True)
NEEDED = PLAN[ID].wanted
pytestmark = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")


# 2.18 gets two patches with the same function.
@pytest.fixture(params=[id for id in (ID, "te-cross-entropy") if PLAN[id].wanted and NEEDED] or [ID])
def function(request):
    """The patched function, from where others take it."""
    import transformer_engine.pytorch as te

    with shim.patched(only=[request.param], require=[request.param]):
        yield te.parallel_cross_entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_losses_and_gradients_are_as_exact_as_those_of_stock(function, dtype, reduce, transposed):
    logits, target, weights = sample(dtype)
    target[1, 2] = target[3, 0] = 7
    weights = torch.tensor(0.3) if reduce else weights
    expected, right = truth(logits, target, weights, 0.1, 7, reduce)

    def errors(function):
        leaf = logits.clone().requires_grad_()
        computed = leaf.transpose(0, 1).contiguous().transpose(0, 1) if transposed else leaf * 1
        found = function(computed, target, 0.1, reduce, None, 7)
        (gradient,) = torch.autograd.grad((found * weights).sum(), leaf)
        assert found.dtype == torch.float32 and gradient.dtype == dtype
        return found.shape, off(found.view_as(expected), expected), off(gradient, right)

    shape, *mine = errors(function)
    with shim.patched(only=[]), cross_entropy("cpu") as stock:
        shape_of_stock, *theirs = errors(stock)
    assert shape == shape_of_stock
    for error, error_of_stock in zip(mine, theirs):
        assert error <= max(1.05 * error_of_stock, 2e-7)


class Logits(torch.autograd.Function):
    """A copy of the values [s, b, V], as an output layer makes it, and where their gradient lies."""

    @staticmethod
    def forward(ctx, values, found):
        logits = values.clone()
        ctx.found = found
        found["logits"] = logits.data_ptr()
        return logits

    @staticmethod
    def backward(ctx, gradient):
        ctx.found["gradient"] = gradient.data_ptr()
        return gradient.clone(), None


def is_written_over(function, hold=lambda logits: None, **options):
    logits, target, _ = sample()
    leaf, found = logits.clone().requires_grad_(), {}

    def loss():
        computed = Logits.apply(leaf, found)
        return function(computed, target, **options).sum(), hold(computed)

    losses, held = loss()
    losses.backward()
    _, right = truth(logits, target, torch.ones(4, 3))
    assert off(leaf.grad, right) < 1e-6
    if torch.is_tensor(held) and held.shape == logits.shape:
        assert torch.equal(held, logits)
    return found["gradient"] == found["logits"]


def test_the_gradient_is_written_over_logits_that_nobody_reads(function):
    assert is_written_over(function)
    assert is_written_over(function, is_cg_capturable=True)


@pytest.mark.parametrize(
    "hold", [lambda logits: logits, torch.Tensor.detach, lambda logits: [logits], lambda logits: logits.square().sum()]
)
def test_logits_that_somebody_may_read_stay(function, hold):
    assert not is_written_over(function, hold)


@pytest.mark.parametrize("later", [False, True])
def test_another_term_of_the_loss_may_need_the_logits(function, later):
    """As on stock, and without an error: an entropy or a square of the logits, made before or after."""
    logits, target, _ = sample()
    leaf = logits.clone().requires_grad_()

    def loss():
        computed = leaf * 1
        if later:
            losses = function(computed, target)
            return losses.sum() + computed.square().sum()
        squares = computed.square().sum()
        return function(computed, target).sum() + squares

    loss().backward()
    _, right = truth(logits, target, torch.ones(4, 3))
    assert off(leaf.grad, right + 2 * logits) < 1e-6


def test_a_leaf_and_a_retained_graph(function):
    logits, target, weights = sample()
    _, right = truth(logits, target, weights)
    leaf = logits.clone().requires_grad_()
    (function(leaf, target) * weights).sum().backward()
    assert torch.equal(leaf.detach(), logits) and off(leaf.grad, right) < 1e-6
    loss = (function(leaf * 1, target) * weights).sum()
    for retain in (True, False):
        (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=retain)
        assert off(gradient, right) < 1e-6


def test_a_caller_that_allows_to_overwrite_gets_upstreams_function(function):
    """From 2.19 on. It makes no copy, and 2.18 does not know the argument."""
    logits, target, _ = sample()
    if "overwrite_input" not in inspect.signature(module().parallel_cross_entropy).parameters:
        with pytest.raises(TypeError, match="overwrite_input"):
            function(logits, target, overwrite_input=True)
        return
    leaf = logits.clone().requires_grad_()
    computed = leaf * 1
    apply = module().CrossEntropyFunction.apply
    with cross_entropy("cpu"), mock.patch.object(module().CrossEntropyFunction, "apply", wraps=apply) as upstreams:
        found = function(computed, target, overwrite_input=True)
        (gradient,) = torch.autograd.grad(found.sum(), computed)
    assert upstreams.call_count == 1 and gradient.data_ptr() == computed.data_ptr()


def test_under_recompute_and_compiled(function):
    logits, target, weights = sample()
    _, right = truth(logits, target, weights)
    with testing.layout_initialised(testing.Layout()):
        leaf = logits.clone().requires_grad_()
        losses = checkpoint(lambda x: function(x * 1, target), False, leaf)
        (losses * weights).sum().backward()
        assert off(leaf.grad, right) < 1e-6
    leaf = logits.clone().requires_grad_()
    compiled = torch.compile(lambda x: function(x * 1, target), backend="eager")
    (compiled(leaf) * weights).sum().backward()
    assert off(leaf.grad, right) < 1e-6


MODEL = {
    "num_layers": 1,
    "mtp_num_layers": None,
    "cross_entropy_loss_fusion": True,
    "cross_entropy_fusion_impl": "te",
}


def test_nothing_in_a_model_of_megatron_core_holds_the_logits(function):
    """Its gradient of the logits lies in the logits."""
    found = {}

    def watched(logits, *args):
        found["logits"] = logits.data_ptr()
        logits.register_hook(lambda gradient: found.update(gradient=gradient.data_ptr()))
        return function(logits, *args)

    with testing.layout_initialised(testing.Layout()):
        model = build_gpt(**MODEL)
        tokens = torch.arange(12)[None] % 8
        with mock.patch.object(extension, "parallel_cross_entropy", watched):
            model(tokens, tokens, None, labels=tokens).mean().backward()
    assert found["gradient"] == found["logits"]


def test_targets_outside_of_the_vocabulary(function):
    logits, target, _ = sample()
    target[0, 0] = -1
    assert function(logits, target)[0, 0] == 0
    target[0, 0] = VOCABULARY
    with pytest.raises(ValueError, match="outside of the vocabulary"):
        function(logits, target)
    target[0, 0] = 0
    assert torch.isfinite(function(logits, target)).all()  # an error before leaves nothing behind


def test_two_ranks(function):
    with testing.Ranks(2) as ranks:
        for errors in ranks.run(smoothed_on_rank):
            assert max(errors) < 1e-6
