"""The largest logit of each token, from the pass of the linear form that computes the log-probabilities anyway."""

import pytest

torch = pytest.importorskip("torch")

from logprob_cases import INTERPRETED  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from shim.ops import Largest, _logprob_linear, linear_token_logprobs  # noqa: E402

IGNORED = -100


def sample(vocabulary, dtype=torch.float64, leading=(13,), width=6):
    generator = torch.Generator().manual_seed(0)
    # Small integers: products are exact in every dtype, and many logits are equal.
    hidden, weight = (
        torch.randint(-3, 4, shape, generator=generator).to(dtype) for shape in ((*leading, width), (vocabulary, width))
    )
    return hidden, weight, torch.randint(0, vocabulary, leading, generator=generator)


def largest_of(hidden, weight, target, **options):
    largest = Largest.like(target, torch.promote_types(hidden.dtype, torch.float32))
    found = linear_token_logprobs(hidden, weight, target, largest=largest, **options)
    return largest, found


# One tile; tiles of whole blocks and a rest; tiles that are no whole blocks. Each with all tokens at once and with 5.
# The kernels know no blocks, and take no fp64.
@pytest.mark.parametrize("tokens", [5] if INTERPRETED else [None, 5])
@pytest.mark.parametrize(
    ("columns", "vocabulary"),
    [(64, 192), (4096, 30)] if INTERPRETED else [(4096, 192), (64, 192), (128, 200), (7, 30), (4096, 1)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *[torch.float64] * (not INTERPRETED)])
def test_it_is_the_first_of_the_largest_logits(columns, vocabulary, tokens, dtype, monkeypatch):
    monkeypatch.setattr(_logprob_linear, "_COLUMNS", columns)
    hidden, weight, target = sample(vocabulary, dtype)
    logits = hidden.double() @ weight.double().t()
    largest, found = largest_of(hidden, weight, target, chunk_size=tokens)
    alone = linear_token_logprobs(hidden, weight, target, chunk_size=tokens)
    assert torch.equal(largest.value.double(), logits.amax(-1))
    assert torch.equal(largest.column, logits.argmax(-1))
    if vocabulary > 20:
        assert (logits == logits.amax(-1, keepdim=True)).sum(-1).max() > 1  # some are equal
    for mine, other in zip(found, alone):
        assert (mine is None and other is None) or torch.equal(mine, other)


@pytest.mark.parametrize("columns", [64, 4096])
def test_with_all_that_a_call_may_have_besides(columns, monkeypatch):
    monkeypatch.setattr(_logprob_linear, "_COLUMNS", columns)
    hidden, weight, target = sample(192, torch.float32, (4, 5))
    bias = torch.randn(192, generator=torch.Generator().manual_seed(1))
    target[1, 2:] = IGNORED
    hidden[1, 3] = torch.nan
    options = {"bias": bias, "temperature": torch.rand(4, 5) + 0.5, "entropy": True, "label_smoothing": 0.1}
    largest, _ = largest_of(hidden, weight, target, **options)
    logits = (hidden @ weight.t() + bias).masked_fill((target == IGNORED).unsqueeze(-1), 0)
    torch.testing.assert_close(largest.value, logits.amax(-1))
    assert torch.equal(largest.column, logits.argmax(-1))


def test_gradients_are_the_same_with_it_and_it_has_none():
    hidden, weight, target = sample(192, torch.float32)
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight)]
    largest, found = largest_of(hidden, weight, target)
    mine = torch.autograd.grad(found.logprob.sum(), leaves)
    right = torch.autograd.grad(linear_token_logprobs(hidden, weight, target).logprob.sum(), leaves)
    assert all(torch.equal(one, other) for one, other in zip(mine, right))
    assert not largest.value.requires_grad


def test_rows_without_a_number_name_a_column_that_there_is():
    hidden, weight, target = sample(192, torch.float32)
    bias = torch.zeros(192)
    bias[:] = -torch.inf
    hidden[3] = torch.nan
    largest, _ = largest_of(hidden, weight, target, bias=bias)
    assert ((largest.column >= 0) & (largest.column < 192)).all()


def test_no_logit_is_computed_for_it_again():
    products = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            products.append("mm" in function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    hidden, weight, target = sample(192, torch.float32)
    with Products():
        largest_of(hidden, weight, target)
    assert sum(products) == 1


def test_no_tokens():
    largest, _ = largest_of(*sample(192, torch.float32, (0,)))
    assert largest.value.shape == largest.column.shape == (0,)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"column": torch.zeros(13)}, r"largest.column is not \[13\] in torch.int64"),
        ({"column": torch.zeros(12, dtype=torch.int64)}, r"largest.column is not \[13\]"),
        ({"value": torch.zeros(12)}, r"largest.value is not \[13\]"),
    ],
)
def test_arguments_that_do_not_fit(change, said):
    hidden, weight, target = sample(192, torch.float32)
    with pytest.raises(ValueError, match=said):
        linear_token_logprobs(hidden, weight, target, largest=Largest.like(target)._replace(**change))
