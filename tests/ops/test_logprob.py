"""Log-probabilities from logits on one rank, against the plain formulas in fp64."""

import math

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from logprob_cases import HALF_ULP, IGNORED, INTERPRETED, cases, exact, gradient_of, sample, weighted  # noqa: E402
from thorough import times  # noqa: E402

from shim.ops import _logprob_chunks, _logprob_rows  # noqa: E402
from shim.ops.logprob import token_logprobs  # noqa: E402


def test_which_passes_these_are():
    expected = "shim.ops._logprob_triton" if INTERPRETED else "shim.ops._logprob_chunks"
    assert _logprob_rows.passes_for(torch.zeros(1)).__name__ == expected
    assert _logprob_rows.passes_for(torch.zeros(1, dtype=torch.float64)).__name__ == "shim.ops._logprob_chunks"


@settings(deadline=None, max_examples=times(10, 30) if INTERPRETED else 200, derandomize=True)
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


@pytest.mark.parametrize("exp_is_slow", [False] if INTERPRETED else [False, True])
@pytest.mark.parametrize("scale, offset", [(1.0, 0.0), (4.0, 0.0), (4.0, 300.0), (20.0, 0.0)])
def test_fp32_is_no_worse_than_torch(scale, offset, exp_is_slow, monkeypatch):
    monkeypatch.setattr(_logprob_chunks, "_exp_is_slow", lambda: exp_is_slow)  # as on either kind of CPU
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
        # Where torch is right by chance: it adds up in another order on each width of a CPU's registers.
        by_chance = 1.1
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


@pytest.mark.parametrize("vendor, slow", [("AuthenticAMD", True), ("GenuineIntel", False), ("", False)])
def test_exp2_takes_the_place_of_mkls_exp_on_other_cpus(vendor, slow, monkeypatch, tmp_path):
    cpus = tmp_path / "cpuinfo"
    cpus.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nvendor_id\t: another\n" if vendor else "")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    exp_is_slow = _logprob_chunks._exp_is_slow.__wrapped__
    assert exp_is_slow(str(cpus)) is slow and not exp_is_slow(str(tmp_path / "none"))
    monkeypatch.setattr(_logprob_chunks, "_exp_is_slow", lambda: slow)
    distance = -torch.arange(100.0) / 9
    right = (distance * _logprob_chunks.LOG2E).exp2() if slow else distance.exp()
    assert torch.equal(_logprob_chunks._exp(distance.clone(), _logprob_chunks.LOG2E), right)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not exp_is_slow(str(cpus))
