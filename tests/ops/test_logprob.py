"""Log-probabilities from logits on one rank, against the plain formulas in fp64."""

import math
import os

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from shim.ops import logprob  # noqa: E402
from shim.ops.logprob import TokenLogprobs, token_logprobs  # noqa: E402
from shim.testing import Footprint  # noqa: E402

# test_logprob_triton.py runs this file once more like this: with the kernels.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

IGNORED = -100
HALF_ULP = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

if INTERPRETED:
    HALF_ULP[torch.bfloat16] *= 2  # Triton's interpreter truncates where the device rounds


def test_which_passes_these_are():
    expected = "shim.ops._logprob_triton" if INTERPRETED else "shim.ops._logprob_chunks"
    assert logprob._passes(torch.zeros(1)).__name__ == expected
    assert logprob._passes(torch.zeros(1, dtype=torch.float64)).__name__ == "shim.ops._logprob_chunks"


def exact(logits, target, temperature=1.0, smoothing=0.0, ignore_index=IGNORED):
    """The formulas as they stand, in fp64: (logprob, entropy, logsumexp)."""
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double().unsqueeze(-1)
    x = logits.double() / temperature
    vocabulary = x.size(-1)
    log_p = x - x.logsumexp(-1, keepdim=True)
    keep = torch.ones_like(target, dtype=torch.bool) if ignore_index is None else target != ignore_index
    at_target = log_p.gather(-1, torch.where(keep, target, 0).long().unsqueeze(-1)).squeeze(-1)
    if smoothing:
        others = log_p.sum(-1) - at_target
        logprob = (1 - smoothing) * at_target + smoothing / (vocabulary - 1) * others
    else:
        logprob = at_target
    entropy = -(log_p.exp() * log_p).sum(-1)
    return TokenLogprobs(*(torch.where(keep, value, 0) for value in (logprob, entropy, x.logsumexp(-1))))


def weighted(found, weights):
    """A loss in which every result has a weight of its own."""
    return sum((value * weight).sum() for value, weight in zip(found, weights) if value is not None)


def gradient_of(function, logits, *args, weights, **keywords):
    logits = logits.detach().clone().requires_grad_()
    found = function(logits, *args, **keywords)
    return found, torch.autograd.grad(weighted(found, weights), logits)[0]


def sample(*shape, dtype=torch.float32, scale=3.0, seed=0, ignored=True):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
    target = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    if ignored:
        target[torch.rand(target.shape, generator=generator) < 0.2] = IGNORED
    weights = torch.randn(3, *shape[:-1], generator=generator, dtype=torch.float64)
    return logits, target, weights


def strided(logits, how):
    """The same values at other strides."""
    if how == "transposed":
        return logits.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "sliced":
        return torch.cat([logits, logits], -1)[..., : logits.size(-1)]
    if how == "batch first" and logits.dim() > 2:
        return logits.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "every other" and logits.dim() > 2:
        return torch.stack([logits, logits], 1)[:, 0]
    if how == "expanded" and logits.dim() > 1:
        return logits[:1].expand_as(logits)
    return logits


@st.composite
def cases(draw):
    leading = draw(st.lists(st.integers(0, 4), max_size=3))
    vocabulary = draw(st.integers(1, 40))
    dtype = draw(st.sampled_from(list(HALF_ULP)))
    logits, target, weights = sample(*leading, vocabulary, dtype=dtype, seed=draw(st.integers(0, 99)))
    temperature = draw(st.sampled_from([1.0, 0.7, 3, "per token", "one tensor"]))
    if temperature == "per token":
        temperature = torch.rand(leading) + 0.5
    elif temperature == "one tensor":
        temperature = torch.tensor(1.7)
    options = {
        "temperature": temperature,
        "entropy": draw(st.sampled_from([False, "no_grad", True])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.3])) if vocabulary > 1 else 0.0,
        **draw(
            st.sampled_from([{}, {"chunk_size": 1}, {"chunk_size": 3}, {"scratch_bytes": 1}, {"scratch_bytes": 999}])
        ),
        "inplace_backward": draw(st.booleans()),
    }
    target = target.to(draw(st.sampled_from([torch.int64, torch.int32])))
    how = draw(st.sampled_from(["as it is", "transposed", "sliced", "batch first", "every other", "expanded"]))
    return strided(logits, how), target, weights, options


@settings(deadline=None, max_examples=30 if INTERPRETED else 200, derandomize=True)
@given(cases())
def test_it_is_the_formula(case):
    logits, target, weights, options = case
    before = logits.clone()
    leaf = logits.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    # Computed logits at the strides of the case, as in place asks for logits that are no leaf.
    computed = torch.as_strided(leaf * 1, logits.shape, leaf.stride())
    if logits.numel() and 0 in logits.stride():
        computed = (leaf[:1] * 1).expand_as(logits)
    found = token_logprobs(computed, target, **options)
    at = logits.detach().double().requires_grad_()
    reference = at[:1].expand_as(at) if logits.numel() and 0 in logits.stride() else at
    expected = exact(reference, target, options["temperature"], options["label_smoothing"])
    assert (found.entropy is None) == (options["entropy"] is False)
    statistics = torch.float64 if logits.dtype == torch.float64 else torch.float32
    for value, right in zip(found, expected):
        if value is not None:
            assert value.dtype == statistics and value.shape == target.shape
            torch.testing.assert_close(
                value.double(), right, rtol=0, atol=1e-5 if statistics != torch.float64 else 1e-12
            )
    if options["entropy"] == "no_grad":
        assert not found.entropy.requires_grad
    weights = weights if options["entropy"] is True else weights * torch.tensor([1, 0, 1]).view(3, *[1] * target.dim())
    differentiable = found if options["entropy"] is True else found._replace(entropy=None)
    mine = torch.autograd.grad(weighted(differentiable, weights), leaf)[0]
    right = torch.autograd.grad(weighted(expected, weights), at)[0]
    assert mine.dtype == logits.dtype
    rounding = HALF_ULP[logits.dtype]
    atol = 1e-12 if statistics == torch.float64 else 5e-6
    if reference is not at:  # expanded: torch adds up the gradients of the copies in the dtype of the logits
        atol += 16 * rounding
    torch.testing.assert_close(mine.double(), right, rtol=rounding, atol=atol)
    assert torch.equal(logits, before)
    if reference is at:
        assert mine[target == IGNORED].count_nonzero() == 0


# Numerics: each bound is the one the module promises


@pytest.mark.parametrize("scale, offset", [(1.0, 0.0), (4.0, 0.0), (4.0, 300.0), (20.0, 0.0)])
def test_fp32_is_no_worse_than_torch(scale, offset):
    logits, target, _ = sample(48, 20000, scale=scale, ignored=False)
    logits += offset
    weights = torch.ones(1, 48)

    def torchs(x, target):
        return (x.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1),)

    right, of_right = gradient_of(lambda x, t: exact(x, t)[:1], logits.double(), target, weights=weights)
    peer, of_peer = gradient_of(torchs, logits, target, weights=weights)
    mine, of_mine = gradient_of(lambda x, t: token_logprobs(x, t)[:1], logits, target, weights=weights)
    for found, other, true in ((mine[0], peer[0], right[0]), (of_mine, of_peer, of_right)):
        error, torch_error = ((value.double() - true).abs() for value in (found, other))
        # Where torch is right by chance: up to four roundings of a number near 1.
        by_chance = 1.05 if INTERPRETED else 1
        assert error.mean() <= by_chance * torch_error.mean()
        assert error.max() <= max(torch_error.max(), 4 * HALF_ULP[torch.float32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_low_precision_lose_one_rounding_of_the_gradient_and_nothing_else(dtype):
    logits, target, weights = sample(48, 20000, dtype=dtype, scale=4.0)
    found, mine = gradient_of(token_logprobs, logits, target, entropy=True, weights=weights)
    expected, right = gradient_of(exact, logits.double(), target, weights=weights)
    for value, true in zip(found, expected):
        assert (value - true).abs().max() < 1e-5
    # The second term is what fp32 leaves before the rounding; below the smallest normal number of fp16 its spacing.
    allowed = right.abs() * HALF_ULP[dtype] + 1e-6 + (2.0**-25 if dtype == torch.float16 else 0)
    assert ((mine.double() - right).abs() <= allowed).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("temperature", [1.3, torch.tensor([[0.5, 2.0, 1.0]], dtype=torch.float64)])
def test_gradcheck(smoothing, temperature):
    logits, target, _ = sample(2, 3, 5, dtype=torch.float64, scale=1.0)
    target[0, 0] = IGNORED

    def function(x):
        return token_logprobs(x, target, temperature=temperature, entropy=True, label_smoothing=smoothing, chunk_size=2)

    assert torch.autograd.gradcheck(lambda x: tuple(function(x)), logits.requires_grad_())


def test_the_same_bits_every_time_and_for_every_chunk():
    logits, target, weights = sample(37, 1003, dtype=torch.bfloat16)
    options = {"entropy": True, "label_smoothing": 0.1, "temperature": 0.9, "weights": weights}
    found, mine = gradient_of(token_logprobs, logits, target, **options)
    for how in ({}, {"chunk_size": 1}, {"chunk_size": 36}, {"scratch_bytes": 100_000}):
        again, of_again = gradient_of(token_logprobs, logits, target, **options, **how)
        assert torch.equal(mine, of_again) and all(torch.equal(a, b) for a, b in zip(found, again))


# Entries that are no numbers


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("begin, end, vocabulary", [(0, 30, 50), (5000, 5040, 5060)])
def test_masked_entries_are_as_if_they_were_not_there(begin, end, vocabulary, dtype, entropy):
    logits, target, weights = sample(6, vocabulary, dtype=dtype, ignored=False)
    kept = slice(begin, end)
    target %= end - begin
    weights = weights if entropy else weights * torch.tensor([1, 0, 1]).view(3, 1)
    masked = torch.full_like(logits, -math.inf)
    masked[:, kept] = logits[:, kept]
    found, mine = gradient_of(token_logprobs, masked, target + begin, entropy=entropy, weights=weights)
    rest, of_rest = gradient_of(token_logprobs, logits[:, kept], target, entropy=entropy, weights=weights)
    for value, expected in zip(found, rest):
        if value is not None:
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(mine[:, kept], of_rest, rtol=2 * HALF_ULP[dtype], atol=1e-6)
    assert mine.count_nonzero() == mine[:, kept].count_nonzero() and mine.isfinite().all()


def test_a_masked_target_has_no_probability():
    logits, target, _ = sample(2, 5, ignored=False)
    logits[0, target[0]] = -math.inf
    leaf = logits.requires_grad_()
    found = token_logprobs(leaf, target, entropy=True)
    assert found.logprob[0] == -math.inf and found.entropy.isfinite().all() and found.logsumexp.isfinite().all()
    (right,) = torch.autograd.grad(-torch.nn.functional.cross_entropy(leaf, target, reduction="sum"), leaf)
    (mine,) = torch.autograd.grad(found.logprob.sum(), leaf)
    torch.testing.assert_close(mine, right)


def test_a_row_of_nothing_is_nan_as_in_torch():
    logits = torch.full((2, 3), -math.inf)
    logits[1] = torch.tensor([0.0, math.inf, 1.0])
    found = token_logprobs(logits, torch.tensor([0, 0]))
    assert found.logprob.isnan().all() and logits.log_softmax(-1)[:, 0].isnan().all()


@pytest.mark.parametrize("dtype", list(HALF_ULP))
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_whatever_ignored_rows_hold_they_are_zero(garbage, dtype):
    logits, target, weights = sample(9, 7, dtype=dtype)
    target[:3] = target[5] = IGNORED  # whole chunks of two, and a row beside one that counts
    target[4] = 1
    logits[target == IGNORED] = garbage
    found, mine = gradient_of(
        token_logprobs, logits, target, entropy=True, label_smoothing=0.1, chunk_size=2, weights=weights
    )
    assert mine.isfinite().all() and mine[target == IGNORED].count_nonzero() == 0 and mine[4].count_nonzero() == 7
    assert all(value[target == IGNORED].count_nonzero() == 0 and value.isfinite().all() for value in found)


def test_another_index_to_ignore_and_none():
    logits, target, weights = sample(4, 7, ignored=False)
    target[1] = 0
    found, mine = gradient_of(token_logprobs, logits, target, ignore_index=0, weights=weights)
    assert found.logprob[target == 0].count_nonzero() == 0 and mine[target == 0].count_nonzero() == 0
    found = token_logprobs(logits, target, ignore_index=None)
    torch.testing.assert_close(found.logprob.double(), exact(logits, target, ignore_index=None).logprob)


# Errors


@pytest.mark.parametrize("wrong", [7, -1, -101, 1 << 40])
@pytest.mark.parametrize("ignore_index", [IGNORED, None])
def test_a_target_outside_of_the_vocabulary_is_an_error(wrong, ignore_index):
    target = torch.tensor([0, wrong, 6])
    with pytest.raises(ValueError, match="outside of the vocabulary of 7"):
        token_logprobs(torch.zeros(3, 7), target, ignore_index=ignore_index)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"logits": torch.zeros(2, 3, dtype=torch.int64)}, "logits are torch.int64"),
        ({"logits": torch.zeros(2, 0)}, "no entries"),
        ({"logits": torch.zeros(())}, "vocabulary dimension"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, r"shape \[3\], not \[2\]"),
        ({"target": torch.zeros(2)}, "target is torch.float32"),
        ({"target": torch.zeros(2, dtype=torch.uint8)}, "target is torch.uint8"),
        ({"target": torch.tensor([0, IGNORED]), "ignore_index": None}, "outside"),
        ({"temperature": 0.0}, "positive"),
        ({"temperature": math.nan}, "positive"),
        ({"temperature": torch.tensor([1.0, 0.0])}, "positive"),
        ({"temperature": torch.tensor([1.0, math.inf])}, "positive"),
        ({"temperature": torch.ones(2, requires_grad=True)}, "detach"),
        ({"entropy": "yes"}, "entropy"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"label_smoothing": 0.1, "logits": torch.zeros(2, 1)}, "vocabulary of two"),
        ({"scratch_bytes": 0}, "scratch_bytes"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"collective": "broadcast"}, "collective"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(change, message):
    arguments = {"logits": torch.zeros(2, 3), "target": torch.zeros(2, dtype=torch.int64), **change}
    with pytest.raises(ValueError, match=message):
        token_logprobs(**arguments)


class OneOfOne:
    """A group of a kind that torch.distributed does not know."""

    rank, size = (lambda self: 0), (lambda self: 1)


def test_a_group_is_asked_itself():
    """No default group has to be there where no message is sent."""
    logits, target, _ = sample(4, 6)
    found = token_logprobs(logits, target, tp_group=OneOfOne(), entropy=True)
    assert all(map(torch.equal, found, token_logprobs(logits, target, entropy=True)))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_process_outside_of_the_group_is_an_error(rank):
    group = type("Group", (), {"rank": lambda self: rank, "size": lambda self: 2})()
    for other in (group, torch.distributed.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(ValueError, match="tp_group"):
            token_logprobs(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), tp_group=other)


# Memory


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


# The gradient in place of the logits: right, or an error


def in_place(x, target, **options):
    return token_logprobs(x, target, inplace_backward=True, entropy=True, **options)


def both(found):
    return found.logprob.sum() + 2 * found.entropy.sum()


@pytest.mark.parametrize("dtype", list(HALF_ULP))
def test_in_place_the_gradient_lies_in_the_logits_and_has_the_same_bits(dtype):
    logits, target, _ = sample(5, 3, 11, dtype=dtype)
    leaf = logits.requires_grad_()
    (plain,) = torch.autograd.grad(both(token_logprobs(leaf, target, entropy=True)), leaf)
    computed = leaf * 1
    (mine,) = torch.autograd.grad(both(in_place(computed, target)), computed)
    assert torch.equal(mine, plain) and mine.data_ptr() == computed.data_ptr()
    assert mine.dtype == dtype and not mine.requires_grad


USES = {
    "a product that saved them": lambda x, target: x.square().sum(),
    "a function of them": lambda x, target: x.sin().sum(),
    "the same function": lambda x, target: both(token_logprobs(x, target, entropy=True)),
    "the same in place": lambda x, target: both(in_place(x, target)),
    "a view": lambda x, target: x.view(-1).square().sum(),
    "what saves nothing": lambda x, target: x.sum(),
}


# Where hooks keep saved tensors, autograd does not look whether they were modified.
@pytest.mark.parametrize("use, hooks", [(use, hooks) for use in USES for hooks in (False, True)])
@pytest.mark.parametrize("order", ["before", "after", "separately before", "separately after"])
def test_in_place_beside_another_use_of_the_logits(use, order, hooks):
    """Every order of the forwards and of the backwards gives the gradient that it gives out of place, or an error."""
    logits, target, _ = sample(5, 11)

    def gradient(function, use):
        leaf = logits.clone().requires_grad_()
        computed = leaf * 1
        with saved_tensors_hooks(lambda x: x, lambda x: x) if hooks else torch.enable_grad():
            losses = [lambda: both(function(computed, target)), lambda: USES[use](computed, target)]
            losses = [make() for make in (losses[::-1] if "before" in order else losses)]
        if "separately" in order:
            losses[0].backward(retain_graph=True)
            losses[1].backward(retain_graph=True)
        else:
            sum(losses).backward()
        return leaf.grad

    out_of_place = "the same function" if use == "the same in place" else use
    expected = gradient(lambda x, t: token_logprobs(x, t, entropy=True), out_of_place)
    try:
        mine = gradient(in_place, use)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        outcome = "an error"
    else:
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)
        outcome = "right"
    # Autograd runs the latest forward first: only who is behind in that order needs the logits after they are gone.
    first = {"before": True, "after": False, "separately before": False, "separately after": True}[order]
    loses = first or use == "the same in place"
    # Where a view is held, or hooks that keep what they are given, nothing is written over the logits.
    written = use not in ("what saves nothing", "a view") and not hooks
    assert outcome == ("an error" if loses and written else "right")


def test_in_place_there_is_no_second_backward():
    logits, target, _ = sample(5, 11)
    computed = logits.requires_grad_() * 1
    loss = both(in_place(computed, target))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


def test_in_place_there_is_no_double_backward():
    logits, target, _ = sample(3, 5)
    computed = logits.requires_grad_() * 1
    (gradient,) = torch.autograd.grad(both(in_place(computed, target)), computed, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        gradient.sum().backward()


class Alias(torch.autograd.Function):
    """Returns the memory of its input, as a CUDA graph's or a cache's function does: to autograd it is no view."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# How logits have memory that somebody else has too, of a leaf or of a tensor that was computed.
SHARED = {
    "an alias": Alias.apply,
    "a view of an alias": lambda x: Alias.apply(x)[:2],
    "an alias of a view": lambda x: Alias.apply(x.view(-1)).view(3, 5),
    "an alias of an alias": lambda x: Alias.apply(Alias.apply(x)),
}


@pytest.mark.parametrize("of_leaf", [True, False])
@pytest.mark.parametrize("how", SHARED)
def test_in_place_of_memory_that_others_have_is_not_in_place(how, of_leaf):
    values, target, _ = sample(3, 5)
    leaf = values.clone().requires_grad_()
    held = leaf if of_leaf else leaf * 1
    logits = SHARED[how](held)
    target = target[: len(logits)]
    (plain,) = torch.autograd.grad(both(token_logprobs(logits, target, entropy=True)), leaf, retain_graph=True)
    both(in_place(logits, target)).backward()
    assert torch.equal(held.detach(), values) and torch.equal(leaf.grad, plain)


def test_in_place_behind_an_operation_that_saved_its_result():
    logits, target, _ = sample(3, 5)
    leaf = logits.requires_grad_()
    (plain,) = torch.autograd.grad(both(token_logprobs(leaf.tanh(), target, entropy=True)), leaf)
    both(in_place(leaf.tanh(), target)).backward()
    assert torch.equal(leaf.grad, plain)


def test_in_place_of_parts_of_the_same_logits():
    """The first backward writes nothing, since the other part is still to come."""
    logits, target, _ = sample(6, 5)
    leaf = logits.requires_grad_()
    (plain,) = torch.autograd.grad(both(token_logprobs(leaf, target, entropy=True)), leaf)
    parts = zip((leaf * 1).split(3), target.split(3))
    sum(both(in_place(part, aim)) for part, aim in parts).backward()
    torch.testing.assert_close(leaf.grad, plain, rtol=1e-6, atol=1e-7)


def test_in_place_of_logits_that_were_modified_since():
    logits, target, _ = sample(3, 5)
    for hooks in (False, True):
        computed = logits.clone().requires_grad_() * 1
        with saved_tensors_hooks(lambda x: x, lambda x: x) if hooks else torch.enable_grad():
            loss = both(token_logprobs(computed, target, entropy=True))
        with torch.no_grad():
            computed.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.view(-1, 5), lambda x: x[1:]])
def test_in_place_of_a_leaf_is_an_error(view):
    leaf = torch.zeros(3, 5, requires_grad=True)
    logits = view(leaf)
    with pytest.raises(ValueError, match="leaf"):
        in_place(logits, torch.zeros(len(logits), dtype=torch.int64))
    # Without a gradient nothing would be written.
    in_place(logits.detach(), torch.zeros(len(logits), dtype=torch.int64))


@pytest.mark.parametrize("how", ["expanded", "every other", "sliced", "batch first", "transposed"])
def test_in_place_at_any_strides(how):
    logits, target, _ = sample(4, 3, 6)
    if how == "expanded":
        logits = logits[:1].expand_as(logits).contiguous()

    def gradient(function):
        leaf = logits.clone().requires_grad_()
        both(function(strided(leaf * 1, how), target)).backward()
        return leaf.grad

    mine = gradient(in_place)
    torch.testing.assert_close(mine, gradient(lambda x, t: token_logprobs(x, t, entropy=True)), rtol=1e-6, atol=1e-7)
    assert mine.count_nonzero()


def test_in_place_of_logits_that_were_saved_elsewhere():
    logits, target, _ = sample(4, 6)
    leaf = logits.requires_grad_()
    (plain,) = torch.autograd.grad(both(token_logprobs(leaf, target, entropy=True)), leaf)
    computed = leaf * 1
    with save_on_cpu():
        loss = both(in_place(computed, target))
    loss.backward()
    assert torch.equal(leaf.grad, plain)
