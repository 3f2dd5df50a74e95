"""Patch label-smoothing on a real release: smoothed losses and their gradients are those of the whole vocabulary."""

from unittest import mock

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import cross_entropy

import shim
from shim import testing
from shim.patches.megatron_core.label_smoothing import proof as label_smoothing_proof
from shim.patches.megatron_core.label_smoothing.proof import SMOOTHING, mine, truth
from shim.testing import Layout

CELLS = {"0.13.1": "all"}

ID, CHUNKED = "label-smoothing", "chunked-logprob"
DTYPES = ("float32", "bfloat16", "float16", "float64")
ROUNDING = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11, "float64": 0}


def sample(dtype):
    return label_smoothing_proof.sample(getattr(torch, dtype))


def smoothed(dtype):
    """(losses, gradient) of this rank."""
    logits, target, weights = sample(dtype)
    computed = mine(logits).requires_grad_() * 1
    losses = tensor_parallel.vocab_parallel_cross_entropy(computed, target, SMOOTHING)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), computed)
    return losses.detach(), gradient


def is_right(dtype):
    losses, gradient = smoothed(dtype)
    expected_losses, expected = truth(*sample(dtype))
    expected = mine(expected)
    near = (gradient - expected).abs() <= 1e-6 + ROUNDING[dtype] * expected.abs()
    return (
        bool((losses - expected_losses).abs().max() <= 1e-5)
        and bool(near.all())
        and gradient.dtype == getattr(torch, dtype)
    )


def right_on_rank(ids, kinds=None):
    """Of each dtype, whether losses and gradient are right at TP 2 with these patches."""
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(tp=2)):
        arguments = {"only": ids, "require": ids} if kinds is None else {"kinds": kinds}
        with shim.patched(**arguments) as report:
            assert all(report[id].state == "applied" for id in ids), str(report)
            return {dtype: is_right(dtype) for dtype in DTYPES}


def test_stock_takes_the_part_of_a_rank_for_the_whole_vocabulary(ranks2):
    for found in ranks2.run(right_on_rank, []):
        assert not any(found.values()), found


@pytest.mark.parametrize("ids", [[ID], [CHUNKED], [ID, CHUNKED]], ids=" ".join)
def test_losses_and_gradients_are_those_of_the_whole_vocabulary(ranks2, ids):
    """Each patch alone, and both together."""
    for found in ranks2.run(right_on_rank, ids):
        assert all(found.values()), found


def test_whoever_asks_for_correctness_only_gets_it(ranks2):
    for found in ranks2.run(right_on_rank, [ID], ["correctness"]):
        assert all(found.values()), found


def upstream_calls(smoothing):
    """How often upstream's own function runs in a call; its results are stock's then, to the bit."""
    logits, target, _ = sample("float32")
    function = cross_entropy._VocabParallelCrossEntropy
    with mock.patch.object(function, "apply", wraps=function.apply) as apply:
        tensor_parallel.vocab_parallel_cross_entropy(mine(logits), target, smoothing)
    return apply.call_count


def upstream_calls_on_rank(layout):
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), shim.patched(only=[ID], require=[ID]):
        return upstream_calls(0.0), upstream_calls(SMOOTHING)


def test_where_stock_is_right_it_is_called(ranks2):
    """Without smoothing, and where one rank has the whole vocabulary."""
    assert ranks2.run(upstream_calls_on_rank, Layout(tp=2)) == [(1, 0)] * 2
    assert ranks2.run(upstream_calls_on_rank, Layout()) == [(1, 1)] * 2


def group_on_rank():
    """Whether a group that is given is the one that is asked, on releases that take one."""
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(tp=2)), shim.patched(only=[ID], require=[ID]):
        logits, target, _ = sample("float32")
        group = parallel_state.get_tensor_model_parallel_group()
        expected = tensor_parallel.vocab_parallel_cross_entropy(mine(logits), target, label_smoothing=SMOOTHING)
        try:
            given = tensor_parallel.vocab_parallel_cross_entropy(mine(logits), target, SMOOTHING, tp_group=group)
        except TypeError as error:
            return "tp_group" in str(error)
        return torch.equal(given, expected)


def test_the_group_of_a_call_is_taken(ranks2):
    assert ranks2.run(group_on_rank) == [True, True]


def compiled_on_rank():
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(tp=2)), shim.patched(only=[ID], require=[ID]):
        logits, target, _ = sample("float32")
        function = torch.compile(
            lambda x: tensor_parallel.vocab_parallel_cross_entropy(x * 1, target, SMOOTHING) * 2, backend="eager"
        )
        plain = tensor_parallel.vocab_parallel_cross_entropy(mine(logits), target, SMOOTHING) * 2
        return torch.allclose(function(mine(logits)), plain)


def test_inside_a_compiled_loss(ranks2):
    """The caller's graph breaks at the call, and the result is the same."""
    assert ranks2.run(compiled_on_rank) == [True, True]
