"""The linear form, whose logits exist a tile at a time, against the form that is given the logits."""

import math

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from logprob_cases import INTERPRETED  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from shim.ops import _logprob_linear  # noqa: E402
from shim.ops.logprob import linear_token_logprobs, token_logprobs  # noqa: E402
from shim.testing import Footprint  # noqa: E402

IGNORED = -100


@pytest.fixture
def narrow_tiles(monkeypatch):
    """Tiles of 7 columns, so that small vocabularies take several."""
    monkeypatch.setattr(_logprob_linear, "_COLUMNS", 7)


def sample(leading, width, vocabulary, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ([*leading, width], [vocabulary, width], [vocabulary])
    hidden, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    target = torch.randint(0, vocabulary, leading, generator=generator)
    target[torch.rand(leading, generator=generator) < 0.2] = IGNORED
    return hidden, weight, bias, target, torch.randn(3, *leading, generator=generator, dtype=torch.float64)


def weighted(found, weights):
    return sum((value * weight).sum() for value, weight in zip(found, weights) if value is not None)


def of_logits(hidden, weight, target, *, bias=None, **options):
    logits = hidden @ weight.t() if bias is None else hidden @ weight.t() + bias
    return token_logprobs(logits, target, **options)


def with_gradients(function, tensors, target, weights, **options):
    hidden, weight, bias = (None if value is None else value.detach().clone().requires_grad_() for value in tensors)
    found = function(hidden, weight, target, bias=bias, **options)
    weighted(found, weights).backward()
    return found, [None if value is None else value.grad for value in (hidden, weight, bias)]


@st.composite
def cases(draw):
    leading = draw(st.lists(st.integers(0, 4), max_size=2))
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    vocabulary = draw(st.integers(2, 30))
    hidden, weight, bias, target, weights = sample(leading, draw(st.integers(1, 5)), vocabulary, dtype)
    options = {
        "temperature": draw(st.sampled_from([1.0, 0.6, torch.rand(leading) + 0.5])),
        "entropy": draw(st.sampled_from([False, True])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.3])),
        **draw(st.sampled_from([{}, {"chunk_size": 1}, {"chunk_size": 3}, {"scratch_bytes": 200}])),
    }
    if draw(st.booleans()) and len(leading) == 2:
        hidden = hidden.transpose(0, 1).contiguous().transpose(0, 1)
    return (hidden, weight, bias if draw(st.booleans()) else None), target, weights, options


@pytest.mark.parametrize("columns", [7, 4096])
def test_it_is_the_function_of_the_product(columns, monkeypatch):
    monkeypatch.setattr(_logprob_linear, "_COLUMNS", columns)

    @settings(deadline=None, max_examples=5 if INTERPRETED else 75, derandomize=True)
    @given(cases())
    def check(case):
        tensors, target, weights, options = case
        found, mine = with_gradients(linear_token_logprobs, tensors, target, weights, **options)
        expected, right = with_gradients(of_logits, tensors, target, weights, **options)
        tolerance = 1e-12 if tensors[0].dtype == torch.float64 else 2e-5
        for value, true in [*zip(found, expected), *zip(mine, right)]:
            assert (value is None) == (true is None)
            if value is not None:
                torch.testing.assert_close(value, true, rtol=tolerance, atol=tolerance)

    check()


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_in_bf16_it_is_as_exact_as_with_logits_in_bf16(chunk_size, fast, narrow_tiles, monkeypatch):
    """Also where the CPU is slow in bf16, so that the products are in fp32."""
    monkeypatch.setattr(_logprob_linear, "_multiplies", lambda dtype: fast)
    tokens, vocabulary = (9, 20) if INTERPRETED else (40, 100)
    *tensors, target, weights = sample([tokens], 64, vocabulary, torch.bfloat16)
    tensors[1] = tensors[1] / 8
    options = {"entropy": True}
    _, exact = with_gradients(of_logits, [tensor.double() for tensor in tensors], target, weights, **options)
    found, mine = with_gradients(linear_token_logprobs, tensors, target, weights, chunk_size=chunk_size, **options)
    _, peer = with_gradients(of_logits, tensors, target, weights, **options)
    assert all(value.dtype == torch.float32 for value in found)
    for gradient, others, true in zip(mine, peer, exact):
        assert gradient.dtype == torch.bfloat16
        error, peers = ((value.double() - true).norm() / true.norm() for value in (gradient, others))
        assert error < (1.5 if fast else 1) * peers and error < (0.02 if fast else 0.003)


def test_no_product_is_in_a_dtype_that_the_cpu_multiplies_by_a_plain_loop(monkeypatch):
    """On a CPU with AVX2 alone, a product in bf16 takes 4 to 60 times as long as in fp32."""
    monkeypatch.setattr(_logprob_linear, "_multiplies", lambda dtype: False)
    seen = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "mm" in function.overloadpacket.__name__:
                seen.extend(value.dtype for value in args if torch.is_tensor(value))
            return function(*args, **(kwargs or {}))

    *tensors, target, weights = sample([6], 4, 20, torch.bfloat16)
    with Products():
        with_gradients(linear_token_logprobs, tensors, target, weights)
    assert seen and {*seen} == {torch.float32}


def test_gradcheck(narrow_tiles):
    hidden, weight, bias, target, _ = sample([5], 3, 9, torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]

    def function(hidden, weight, bias):
        options = {"temperature": 0.8, "entropy": True, "label_smoothing": 0.1, "chunk_size": 2}
        return tuple(linear_token_logprobs(hidden, weight, target, bias=bias, **options))

    assert torch.autograd.gradcheck(function, leaves)


def test_ignored_tokens_may_hold_anything(narrow_tiles):
    *tensors, target, weights = sample([9], 4, 20, torch.float32)
    target[:4] = target[6] = IGNORED
    target[5] = 3
    clean, right = with_gradients(linear_token_logprobs, tensors, target, weights, entropy=True, chunk_size=2)
    tensors[0][target == IGNORED] = math.nan
    found, mine = with_gradients(linear_token_logprobs, tensors, target, weights, entropy=True, chunk_size=2)
    assert all(torch.equal(a, b) for a, b in zip([*found, *mine], [*clean, *right]))
    assert mine[0][target == IGNORED].count_nonzero() == 0 and mine[0][5].count_nonzero()
    target[:] = IGNORED
    _, mine = with_gradients(linear_token_logprobs, tensors, target, weights, entropy=True, chunk_size=2)
    assert all(gradient.count_nonzero() == 0 for gradient in mine)


def test_only_what_is_asked_for_gets_a_gradient():
    hidden, weight, bias, target, weights = sample([6], 4, 20, torch.float32)
    for wanted in range(3):
        tensors = [
            tensor.clone().requires_grad_(place == wanted) for place, tensor in enumerate((hidden, weight, bias))
        ]
        expected = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
        weighted(linear_token_logprobs(*tensors[:2], target, bias=tensors[2]), weights).backward()
        weighted(of_logits(*expected[:2], target, bias=expected[2]), weights).backward()
        torch.testing.assert_close(tensors[wanted].grad, expected[wanted].grad)
        assert sum(tensor.grad is not None for tensor in tensors) == 1


def test_twice_differentiable_it_is_not():
    hidden, weight, _, target, _ = sample([3], 4, 5, torch.float32)
    hidden.requires_grad_()
    loss = linear_token_logprobs(hidden, weight, target).logprob.sum()
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weight": torch.zeros(5, 3)}, r"must be \[..., H\] and \[V, H\]"),
        ({"weight": torch.zeros(4)}, r"must be \[..., H\] and \[V, H\]"),
        ({"weight": torch.zeros(5, 4, dtype=torch.float64)}, "weight is torch.float64"),
        ({"bias": torch.zeros(4)}, r"bias has the shape \[4\]"),
        ({"bias": torch.zeros(5, dtype=torch.bfloat16)}, "bias is torch.bfloat16"),
        ({"target": torch.tensor([0, 5])}, "vocabulary of 5"),
        ({"chunk_size": 0}, "chunk_size"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(change, message):
    arguments = {"hidden": torch.zeros(2, 4), "weight": torch.zeros(5, 4), "target": torch.tensor([0, 1]), **change}
    with pytest.raises(ValueError, match=message):
        linear_token_logprobs(**arguments)


@pytest.mark.parametrize("backend", ["eager"])
def test_inside_a_compiled_caller(backend):
    *tensors, target, weights = sample([5], 4, 11, torch.float32)

    def caller(hidden, weight, target, bias):
        return tuple(value * 2 for value in linear_token_logprobs(hidden * 2, weight, target, bias=bias, entropy=True))

    expected, right = with_gradients(caller, tensors, target, weights)
    try:
        found, mine = with_gradients(torch.compile(caller, backend=backend), tensors, target, weights)
    finally:
        torch.compiler.reset()
    assert all(torch.equal(a, b) for a, b in zip([*found, *mine], [*expected, *right]))


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fast", [False, True])
def test_peak_memory_is_the_gradients_and_the_scratch(dtype, entropy, fast, monkeypatch):
    tokens, width, vocabulary, scratch = 256, 32, 8192, 1 << 18
    monkeypatch.setattr(_logprob_linear, "_COLUMNS", 2048)
    monkeypatch.setattr(_logprob_linear, "_multiplies", lambda dtype: fast or dtype == torch.float32)
    hidden, weight, _, target, _ = sample([tokens], width, vocabulary, dtype)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    with Footprint() as footprint:
        found = linear_token_logprobs(*leaves, target, entropy=entropy, scratch_bytes=scratch)
        loss = found.logprob.sum() + (found.entropy.sum() if entropy else 0)
        gradients = torch.autograd.grad(loss, leaves)
        del gradients
    logits = 4 * tokens * vocabulary
    of_weight = weight.element_size() * weight.numel()
    of_hidden = hidden.numel() * (4 if dtype == torch.float32 else 6)
    # The rows of the weight of one tile: their gradient, and a product or they themselves in fp32.
    low = 0 if dtype == torch.float32 else 2048 * width * (4 + (2 if fast else 4))
    small = 4 * 40 * tokens
    assert of_weight < footprint.peak_bytes <= of_weight + of_hidden + scratch + low + small < logits / 2
