"""Log-probabilities over tensor-parallel gloo ranks against those of the whole vocabulary on one rank."""

import contextlib
import math
from collections import Counter
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from shim.ops.logprob import LowRank, linear_token_logprobs, token_logprobs  # noqa: E402
from shim.testing import Ranks  # noqa: E402

IGNORED = -100
COLLECTIVES = [
    name
    for name in dir(dist)
    if name.startswith(
        ("all_", "reduce", "broadcast", "gather", "scatter", "send", "recv", "isend", "irecv", "barrier")
    )
    and callable(getattr(dist, name))
]


@contextlib.contextmanager
def counted():
    """Which functions of torch.distributed are called."""
    found = Counter()
    with contextlib.ExitStack() as patches:
        for name in COLLECTIVES:

            def counting(*args, _name=name, _function=getattr(dist, name), **keywords):
                found[_name] += 1
                return _function(*args, **keywords)

            patches.enter_context(mock.patch.object(dist, name, counting))
        yield found


class Shard(torch.autograd.Function):
    """This rank's columns of what every rank has; backward every rank gets the gradient of all columns."""

    @staticmethod
    def forward(ctx, whole):
        return whole.chunk(dist.get_world_size(), -1)[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, gradient):
        shards = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, gradient.contiguous())
        return torch.cat(shards, -1)


def sample(tokens, vocabulary, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(tokens, 2, vocabulary, generator=generator, dtype=torch.float64) * 3).to(dtype)
    target = torch.randint(0, vocabulary, (tokens, 2), generator=generator)
    target[torch.rand(target.shape, generator=generator) < 0.2] = IGNORED
    return logits, target, torch.randn(3, tokens, 2, generator=generator, dtype=torch.float64)


def weighted(found, weights):
    return sum((value * weight).sum() for value, weight in zip(found, weights) if value is not None)


def against_one_rank(ranks):
    """Every combination of dtype and options; which functions of torch.distributed each pass called."""
    counts = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        logits, target, weights = sample(7, 20, dtype)
        # One shard is masked throughout in one row, and all but one entry in another.
        logits[1, 0, :5] = -math.inf
        logits[2, 1, 1:] = -math.inf
        target[1, 0], target[2, 1] = 19, 0
        for options in (
            {},
            {"entropy": True},
            {"entropy": True, "temperature": torch.rand(7, 2, generator=torch.Generator().manual_seed(3)) + 0.5},
            {"entropy": "no_grad", "temperature": 0.7, "inplace_backward": True, "chunk_size": 3},
        ):
            of_results = weights if options.get("entropy") is True else weights * torch.tensor([1, 0, 1]).view(3, 1, 1)
            leaf = logits.double().requires_grad_()
            expected = token_logprobs(leaf, target, **{**options, "inplace_backward": False})
            if options.get("entropy") != True:  # noqa: E712 ("no_grad" is not True)
                expected = expected._replace(entropy=None)
            (right,) = torch.autograd.grad(weighted(expected, of_results), leaf)
            right = right.chunk(ranks, -1)[dist.get_rank()]
            shard = logits.chunk(ranks, -1)[dist.get_rank()].clone().requires_grad_()
            computed = shard * 1
            with counted() as forward:
                found = token_logprobs(computed, target, tp_group=dist.group.WORLD, **options)
            if expected.entropy is None:
                found = found._replace(entropy=None)
            with counted() as backward:
                (mine,) = torch.autograd.grad(weighted(found, of_results), computed)
            counts.append((dict(forward), dict(backward)))
            for value, true in zip(found, expected):
                if value is not None:
                    torch.testing.assert_close(value.double(), true, rtol=0, atol=1e-5)
            rounding = 2.0**-8 if dtype == torch.bfloat16 else 0
            atol = 1e-12 if dtype == torch.float64 else 2e-6
            torch.testing.assert_close(mine.double(), right, rtol=rounding, atol=atol)
            assert mine[target == IGNORED].count_nonzero() == 0
    return counts


def smoothed(ranks):
    """Labels are smoothed over the global vocabulary."""
    logits, target, weights = sample(5, 12, torch.float64)
    (mine, right) = (logits.clone().requires_grad_() for _ in range(2))
    found = token_logprobs(Shard.apply(mine), target, tp_group=dist.group.WORLD, label_smoothing=0.2)
    expected = token_logprobs(right, target, label_smoothing=0.2)
    torch.testing.assert_close(found.logprob, expected.logprob)
    (found.logprob * weights[0]).sum().backward()
    (expected.logprob * weights[0]).sum().backward()
    torch.testing.assert_close(mine.grad, right.grad)
    return True


def checked():
    logits, target, _ = sample(2, 6, torch.float64)

    def function(whole):
        shard = Shard.apply(whole)
        options = {"entropy": True, "label_smoothing": 0.1, "temperature": 0.8}
        return tuple(token_logprobs(shard, target, tp_group=dist.group.WORLD, **options))

    return torch.autograd.gradcheck(function, logits.requires_grad_())


def the_same_bits_on_every_rank():
    logits, target, weights = sample(33, 64, torch.bfloat16)
    shard = logits.chunk(dist.get_world_size(), -1)[dist.get_rank()].clone().requires_grad_()
    results = []
    for _ in range(2):
        found = token_logprobs(shard, target, tp_group=dist.group.WORLD, entropy=True)
        (gradient,) = torch.autograd.grad(weighted(found, weights), shard)
        results.append(([value.tolist() for value in found], gradient.tolist()))
    assert results[0] == results[1]
    return results[0][0]


def at_the_edges(ranks):
    group = dist.group.WORLD
    empty = torch.zeros(0, 3, requires_grad=True)
    found = token_logprobs(empty, torch.zeros(0, dtype=torch.int64), tp_group=group, entropy=True)
    found.logprob.sum().backward()
    assert found.entropy.shape == (0,) and empty.grad.shape == (0, 3)
    for target in (3 * ranks, -1):
        with pytest.raises(ValueError, match=f"vocabulary of {3 * ranks}"):
            token_logprobs(torch.zeros(2, 3), torch.tensor([0, target]), tp_group=group)
    nothing = torch.full((1, 3), -math.inf)
    assert token_logprobs(nothing, torch.tensor([0]), tp_group=group).logprob.isnan().all()
    # A group of this rank alone is the whole vocabulary.
    alone = [dist.new_group([rank]) for rank in range(ranks)][dist.get_rank()]
    assert token_logprobs(torch.zeros(1, 3), torch.tensor([2]), tp_group=alone).logprob.exp().item() == pytest.approx(
        1 / 3
    )
    return True


def linear(ranks):
    """The linear form, and which functions of torch.distributed its backward called."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(6, 2, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(20, 8, generator=generator, dtype=torch.float64)
    bias = torch.randn(20, generator=generator, dtype=torch.float64)
    _, target, weights = sample(6, 20, torch.float64)
    options = {"entropy": True, "label_smoothing": 0.1, "temperature": 0.9}
    whole = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    expected = token_logprobs(whole[0] @ whole[1].t() + whole[2], target, **options)
    weighted(expected, weights).backward()
    counts = []
    for sums in (True, False):
        mine = [
            hidden.clone(),
            weight.chunk(ranks)[dist.get_rank()].clone(),
            bias.chunk(ranks)[dist.get_rank()].clone(),
        ]
        for tensor in mine:
            tensor.requires_grad_()
        with counted() as forward:
            found = linear_token_logprobs(
                mine[0], mine[1], target, bias=mine[2], tp_group=dist.group.WORLD, sum_hidden_grad=sums, **options
            )
        with counted() as backward:
            weighted(found, weights).backward()
        counts.append((dict(forward), dict(backward)))
        for value, true in zip(found, expected):
            torch.testing.assert_close(value, true)
        if not sums:
            dist.all_reduce(mine[0].grad)
        torch.testing.assert_close(mine[0].grad, whole[0].grad)
        for gradient, true in ((mine[1].grad, whole[1].grad), (mine[2].grad, whole[2].grad)):
            torch.testing.assert_close(gradient, true.chunk(ranks)[dist.get_rank()])
    return counts


def low_rank(ranks):
    """A low-rank product beside the large one; each sums the gradient of its own hidden states, or does not."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((6, 2, 8), (20, 8), (6, 2, 3), (20, 3))
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    _, target, weights = sample(6, 20, torch.float64)
    expected = token_logprobs(leaves[0] @ leaves[1].t() + leaves[2] @ leaves[3].t(), target)
    weighted(expected, weights).backward()
    for sums in ((True, True), (False, True), (True, False)):
        mine = [
            leaf.detach().clone() if leaf.dim() == 3 else leaf.detach().chunk(ranks)[dist.get_rank()] for leaf in leaves
        ]
        for tensor in mine:
            tensor.requires_grad_()
        other = LowRank(*mine[2:], sum_hidden_grad=sums[1])
        found = linear_token_logprobs(
            *mine[:2], target, tp_group=dist.group.WORLD, sum_hidden_grad=sums[0], low_rank=other
        )
        weighted(found, weights).backward()
        for place in (0, 1):
            if not sums[place]:
                dist.all_reduce(mine[2 * place].grad)
        for tensor, leaf in zip(mine, leaves):
            whole = leaf.grad if leaf.dim() == 3 else leaf.grad.chunk(ranks)[dist.get_rank()]
            torch.testing.assert_close(tensor.grad, whole)
    return True


def all_of_it(ranks):
    return {
        "counts": against_one_rank(ranks),
        "smoothed": smoothed(ranks),
        "bits": the_same_bits_on_every_rank(),
        "edges": at_the_edges(ranks),
        "linear": linear(ranks),
        "low rank": low_rank(ranks),
        "checked": [checked()] if ranks == 2 else [],
    }


@pytest.fixture(scope="module", params=[2, 4])
def found(request):
    with Ranks(request.param) as world:
        yield world.run(all_of_it, request.param)


def test_results_and_gradients_are_those_of_one_rank(found):
    assert all(rank["smoothed"] and rank["edges"] and len(rank["counts"]) == 12 for rank in found)


def test_one_all_gather_forward_and_nothing_backward(found):
    for rank in found:
        for forward, backward in rank["counts"]:
            assert forward == {"all_gather_into_tensor": 1} and backward == {}


def test_gradcheck(found):
    assert all(all(rank["checked"]) for rank in found) and len(found[0]["checked"]) == (1 if len(found) == 2 else 0)


def test_every_rank_has_the_same_results_bit_by_bit(found):
    assert all(rank["bits"] == found[0]["bits"] for rank in found)


def test_a_low_rank_product_sums_its_own_gradient(found):
    assert all(rank["low rank"] for rank in found)


def test_the_linear_form_sums_the_gradient_of_hidden_once_or_not_at_all(found):
    assert all(
        rank["linear"] == [({"all_gather_into_tensor": 1}, {"all_reduce": 1}), ({"all_gather_into_tensor": 1}, {})]
        for rank in found
    )
