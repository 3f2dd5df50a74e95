"""The linear form with a low-rank product beside the large one, and with a buffer for the gradient of a weight."""

import pytest

torch = pytest.importorskip("torch")

from shim.ops import LowRank, _logprob_linear, linear_token_logprobs  # noqa: E402
from shim.testing import Footprint  # noqa: E402

IGNORED = -100
# Tiles of 7 columns and of 5 tokens, so that small shapes take several of both; and one tile of all.
TILES = [(7, 5), (4096, None), (7, None), (4096, 5)]


def sample(dtype=torch.float64, tokens=13, width=6, rank=2, vocabulary=20):
    generator = torch.Generator().manual_seed(0)
    shapes = ([tokens, width], [vocabulary, width], [tokens, rank], [vocabulary, rank])
    leaves = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    ]
    target = torch.randint(0, vocabulary, (tokens,), generator=generator)
    target[torch.rand(tokens, generator=generator) < 0.2] = IGNORED
    return leaves, target


def in_one_product(leaves, target, **options):
    """With the low rank as more columns of one weight."""
    hidden, weight, other, of_rank = leaves
    return linear_token_logprobs(torch.cat([hidden, other], 1), torch.cat([weight, of_rank], 1), target, **options)


def both(leaves, target, **options):
    hidden, weight, other, of_rank = leaves
    return linear_token_logprobs(hidden, weight, target, low_rank=LowRank(other, of_rank), **options)


def total(found):
    return (found.logprob * torch.arange(1, 1 + found.logprob.numel())).sum() + (found.logsumexp**2).sum()


@pytest.mark.parametrize(("columns", "tokens"), TILES)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "entropy": True, "label_smoothing": 0.1}])
def test_it_is_one_product_of_what_stands_side_by_side(columns, tokens, options, monkeypatch):
    monkeypatch.setattr(_logprob_linear, "_COLUMNS", columns)
    leaves, target = sample()
    right = torch.autograd.grad(total(in_one_product(leaves, target, **options)), leaves)
    found = both(leaves, target, chunk_size=tokens, **options)
    for mine, of_one in zip(found, in_one_product(leaves, target, **options)):
        torch.testing.assert_close(mine, of_one, rtol=1e-12, atol=1e-12)
    for mine, true in zip(torch.autograd.grad(total(found), leaves), right):
        torch.testing.assert_close(mine, true, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("trained", [(2, 3), (0, 2, 3), (3,), (1,)])
def test_what_is_frozen_gets_no_gradient(trained):
    leaves, target = sample()
    right = torch.autograd.grad(total(in_one_product(leaves, target)), leaves)
    for place, leaf in enumerate(leaves):
        leaf.requires_grad_(place in trained)
    total(both(leaves, target)).backward()
    for place, leaf in enumerate(leaves):
        assert (leaf.grad is not None) == (place in trained)
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, right[place])


def test_gradcheck(monkeypatch):
    monkeypatch.setattr(_logprob_linear, "_COLUMNS", 7)
    leaves, target = sample(tokens=5)
    assert torch.autograd.gradcheck(lambda *leaves: tuple(both(leaves, target, chunk_size=2, entropy=True)), leaves)


def test_ignored_tokens_may_hold_anything():
    leaves, target = sample()
    right = torch.autograd.grad(total(both(leaves, target)), leaves)
    with torch.no_grad():
        leaves[2][target == IGNORED] = torch.nan
    found = torch.autograd.grad(total(both(leaves, target)), leaves)
    assert all(torch.equal(mine, true) for mine, true in zip(found, right))


@pytest.mark.parametrize(("columns", "tokens"), TILES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_buffer", [torch.float64, torch.float32, torch.bfloat16])
def test_a_buffer_gets_the_gradient_of_the_weight(columns, tokens, dtype, of_buffer, monkeypatch):
    """On top of what it holds, as exactly as its dtype and the gradient of the logits allow."""
    monkeypatch.setattr(_logprob_linear, "_COLUMNS", columns)
    leaves, target = sample(dtype, tokens=200)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    right = torch.autograd.grad(both(exact, target).logprob.mean(), exact)
    held = [float(grad.abs().mean()) for grad in right]
    buffers = [torch.full(leaf.shape, value, dtype=of_buffer) for leaf, value in zip(leaves, held)]
    held = [float(buffer.view(-1)[0]) for buffer in buffers]
    hidden, weight, other, of_rank = leaves
    low_rank = LowRank(other, of_rank, buffers[3])
    found = linear_token_logprobs(hidden, weight, target, low_rank=low_rank, weight_grad=buffers[1], chunk_size=tokens)
    found.logprob.mean().backward()
    assert weight.grad is None and of_rank.grad is None and hidden.grad is not None
    coarse = max(torch.finfo(dtype).eps * 2, torch.finfo(of_buffer).eps * 8, 1e-6 * (dtype != torch.float64), 1e-13)
    for place in (1, 3):
        error = (buffers[place].double() - held[place] - right[place]).norm() / right[place].norm()
        assert error < coarse, (place, error)


def test_what_one_tile_is_rounded_to_is_not_what_the_buffer_gets():
    """Entries of both signs cancel in a sum: with the rounding of each product, small gradients would be lost."""
    hidden = torch.ones(2, 1, dtype=torch.bfloat16)
    of_logits = torch.tensor([[1.0, 0.0], [2.0**-9, 1.0]], dtype=torch.bfloat16)
    from shim.ops._logprob_products import WeightGradient

    weight, into = torch.zeros(2, 1, dtype=torch.bfloat16), torch.zeros(2, 1)
    gradient = WeightGradient(weight, into, 2, torch.float32, direct=True)
    gradient.begin(slice(0, 2))
    gradient.add(of_logits, hidden)
    gradient.end()
    assert into.tolist() == [[1 + 2.0**-9], [1.0]]
    assert (of_logits.t() @ hidden).tolist() == [[1.0], [1.0]]


def test_neither_makes_a_weight_of_both():
    """The weight with the columns of the low rank would be a copy of the weight."""
    leaves, target = sample(torch.float32, tokens=8, width=512, vocabulary=4096)
    for leaf in leaves:
        leaf.requires_grad_(leaf is not leaves[1])
    peaks = []
    for function in (both, in_one_product):
        with Footprint() as footprint:
            function(leaves, target, scratch_bytes=1 << 16).logprob.sum().backward()
        peaks.append(footprint.peak_bytes / (leaves[1].numel() * 4))
    assert peaks[0] < 0.1 and peaks[1] > 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"low_rank": LowRank(torch.ones(13, 3), torch.ones(20, 2))}, "low_rank has the shapes"),
        ({"low_rank": LowRank(torch.ones(12, 2), torch.ones(20, 2))}, "low_rank has the shapes"),
        ({"low_rank": LowRank(torch.ones(13, 2), torch.ones(20, 2).double())}, "low_rank.weight is torch.float64"),
        ({"weight_grad": torch.ones(20, 5)}, r"weight_grad is \[20, 5\]"),
    ],
)
def test_arguments_that_do_not_fit(change, said):
    (hidden, weight, *_), target = sample(torch.float32)
    with pytest.raises(ValueError, match=said):
        linear_token_logprobs(hidden, weight, target, **change)
