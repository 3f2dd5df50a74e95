"""Log-probabilities: what their step takes in memory, and that they work in all the ways callers use them."""

import pytest

torch = pytest.importorskip("torch")

from logprob_cases import IGNORED, INTERPRETED, exact, gradient_of, sample  # noqa: E402
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from shim.ops.logprob import token_logprobs  # noqa: E402
from shim.testing import Footprint  # noqa: E402


def peak_of_step(function, logits, target):
    """Bytes beyond the logits at the peak of forward and backward, gradient included."""
    computed = logits.detach().requires_grad_() * 1
    with Footprint() as footprint:
        torch.autograd.grad(function(computed, target), computed)
    return footprint.peak_bytes


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(
    "dtype, inplace, share",
    [("bfloat16", False, 0.5), ("bfloat16", True, 0), ("float32", False, 1), ("float32", True, 0)],
)
def test_peak_memory_is_one_gradient_and_the_scratch(dtype, inplace, share, entropy):
    tokens, vocabulary, scratch = 128, 4096, 1 << 17
    logits, target, _ = sample(tokens, vocabulary, dtype=getattr(torch, dtype))

    def loss(x, t):
        found = token_logprobs(x, t, entropy=entropy, scratch_bytes=scratch, inplace_backward=inplace)
        return found.logprob.sum() + (found.entropy.sum() if entropy else 0)

    unit = 4 * tokens * vocabulary
    per_token = 40 * 8 * tokens  # numbers for each token: the statistics, the targets and what is made of them
    assert unit * share < peak_of_step(loss, logits, target) <= unit * share + scratch + per_token


def test_the_measure_sees_what_a_plain_formula_takes():
    logits, target, _ = sample(128, 4096, ignored=False)
    plain = peak_of_step(lambda x, t: x.log_softmax(-1).gather(-1, t.unsqueeze(-1)).sum(), logits, target)
    assert plain >= 2 * 4 * logits.numel()


@pytest.mark.skipif(INTERPRETED, reason="kernels copy nothing")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_operation_copies_logits_of_half_precision_inside_of_it(dtype):
    """torch's scatter_ does, into fp32, where a footprint sees nothing."""
    logits, target, _ = sample(128, 4096, dtype=dtype)
    computed = logits.requires_grad_() * 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        torch.autograd.grad(token_logprobs(computed, target, scratch_bytes=1 << 17).logprob.sum(), computed)
    assert max(event.self_cpu_memory_usage for event in profiled.events()) == logits.nbytes  # of its gradient


def test_saved_are_the_logits_themselves_and_a_few_numbers_a_token():
    logits, target, _ = sample(64, 3, 300)
    computed = logits.requires_grad_() * 1
    saved = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        token_logprobs(computed, target, entropy=True, temperature=torch.full((64, 3), 0.5))
    others = [tensor for tensor in saved if tensor.data_ptr() != computed.data_ptr()]
    assert len(others) == len(saved) - 1
    assert sum(tensor.numel() for tensor in others) <= 5 * target.numel()


# How callers use it


def test_the_gradient_of_one_result_alone_and_of_none():
    logits, target, weights = sample(5, 11)
    for place in range(3):
        one = torch.zeros_like(weights)
        one[place] = weights[place]
        leaf, reference = logits.clone().requires_grad_(), logits.double().requires_grad_()
        (mine,) = torch.autograd.grad((token_logprobs(leaf, target, entropy=True)[place] * weights[place]).sum(), leaf)
        (right,) = torch.autograd.grad((exact(reference, target)[place] * weights[place]).sum(), reference)
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=1e-6)
    with torch.no_grad():
        assert not token_logprobs(logits.requires_grad_(), target).logprob.requires_grad
    assert not token_logprobs(logits.detach(), target).logprob.requires_grad


def test_twice_differentiable_it_is_not():
    logits, target, _ = sample(3, 5, ignored=False)
    logits = logits.requires_grad_() * 1
    (gradient,) = torch.autograd.grad(token_logprobs(logits, target).logprob.sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        gradient.sum().backward()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_recompute(reentrant, inplace):
    hidden = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    target = torch.tensor([0, 5, IGNORED, 1, 8, 2])

    def loss(leaf):
        return token_logprobs(leaf @ leaf.t()[:, :].repeat(1, 2), target, inplace_backward=inplace).logprob

    plain, again = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss(plain).sum().backward()
    checkpoint(loss, again, use_reentrant=reentrant).sum().backward()
    assert torch.equal(plain.grad, again.grad)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_inside_a_compiled_caller(backend, inplace):
    logits, target, weights = sample(5, 11)

    def caller(leaf):
        found = token_logprobs(leaf * 2, target, entropy=True, inplace_backward=inplace)
        return found.logprob + 1, found.entropy * 2, found.logsumexp

    expected, right = gradient_of(caller, logits, weights=weights)
    try:
        found, mine = gradient_of(torch.compile(caller, backend=backend), logits, weights=weights)
    finally:
        torch.compiler.reset()
    assert all(torch.equal(a, b) for a, b in zip(found, expected)) and torch.equal(mine, right)


def test_a_hook_on_the_logits_sees_and_changes_the_gradient():
    logits, target, _ = sample(5, 11)
    leaf = logits.clone().requires_grad_()
    (plain,) = torch.autograd.grad(token_logprobs(leaf, target).logprob.sum(), leaf)
    computed = leaf * 1
    seen = []
    computed.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 3)
    token_logprobs(computed, target).logprob.sum().backward()
    assert torch.equal(seen[0], plain) and torch.equal(leaf.grad, plain * 3)


def test_the_same_logits_twice_and_for_something_else():
    logits, target, _ = sample(5, 11)
    leaf, reference = logits.clone().requires_grad_(), logits.double().requires_grad_()
    other = torch.where(target < 5, 7, target)

    def loss(function, x):
        return (function(x, target).logprob * function(x, other).logprob).sum() + x.square().sum()

    loss(token_logprobs, leaf * 1).backward()
    loss(exact, reference).backward()
    torch.testing.assert_close(leaf.grad.double(), reference.grad, rtol=1e-5, atol=1e-5)
