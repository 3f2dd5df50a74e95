"""mla-query-norm-gradient: the norm of a compressed query is left out of the sum over ranks, and nothing else is."""

import contextlib
import importlib

import pytest
import torch
import trainers_in_small as trainers
from all_reduces import sizes_of_all_reduces
from trainer_cases import both

import shim
from shim import testing
from shim.patches.megatron_core._proof_mla import BATCH, HIDDEN, TOKENS, build, without_te

CELLS = {"0.12.3": "all"}

ID = "mla-query-norm-gradient"
DECISION = shim.plan()[ID]
pytestmark = pytest.mark.skipif(not DECISION.wanted, reason="this release needs no patch")
QUERY, KEY = "0.q_layernorm.weight", "0.kv_layernorm.weight"
OF_HEADS = "1.q_layernorm.weight"


class OfHeads(torch.nn.Module):
    """As an attention that norms each head of this rank: its gradient is a part of the whole."""

    def __init__(self):
        super().__init__()
        self.q_layernorm = torch.nn.LayerNorm(HIDDEN, bias=False)

    def forward(self, hidden, _):
        return self.q_layernorm(hidden), None


def nothing(layer): ...


def frozen(layer):
    layer.q_layernorm.requires_grad_(False)


def patched(beside):
    """The patch, after ("trainer") or before ("shim") slime has put its own function in the place of the one that sums.

    None: no slime.
    """
    if beside is None:
        return shim.patched(only=[ID], require=[ID])
    return both(trainers.slime_coalesced_gradients, ID, beside)


def summed(active, change, sequence_parallel, beside=None):
    """How many numbers are in each sum over ranks, and the gradients before and after it, by name."""
    from megatron.core import parallel_state

    distributed = importlib.import_module("megatron.core.distributed")
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    name = DECISION.wiring.targets[0].partition(":")[2]
    with without_te() as module:
        attention = build(module, qk_layernorm=True, sequence_parallel=sequence_parallel)
        change(attention)
        model = torch.nn.Sequential(attention, OfHeads())
        config = attention.config
        wrapped = distributed.DistributedDataParallel(config, distributed.DistributedDataParallelConfig(), model)
        tokens = TOKENS // 2 if sequence_parallel else TOKENS
        rank = parallel_state.get_tensor_model_parallel_rank()
        hidden = torch.randn(tokens, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1 + rank))
        for layer in model:
            output = layer(hidden, None)[0]
            (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
        wrapped.finish_grad_sync()
        weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        before = {name: weight.main_grad.clone() for name, weight in weights.items()}
        patch = patched(beside) if active else contextlib.nullcontext()
        with patch, sizes_of_all_reduces() as sums:
            getattr(finalize, name)([wrapped], config)
        return sums, before, {name: weight.main_grad.clone() for name, weight in weights.items()}


def on_two_ranks(*args):
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(tp=2)):
        return summed(*args)


def test_the_norm_of_the_query_is_left_out_and_that_of_heads_is_summed(ranks2):
    first, second = ranks2.run(on_two_ranks, True, nothing, False)
    for sums, before, after in (first, second):
        assert sums == [HIDDEN]  # still one message
        for name in after:
            whole = first[1][name] + second[1][name]
            assert torch.equal(after[name], whole if name == OF_HEADS else before[name]), name


@pytest.mark.parametrize("beside", ["shim", "trainer"])
def test_a_function_that_a_trainer_has_in_that_place_leaves_it_out_too(ranks2, beside):
    first, second = ranks2.run(on_two_ranks, True, nothing, False, beside)
    for _, before, after in (first, second):
        for name in after:
            whole = first[1][name] + second[1][name]
            assert torch.equal(after[name], whole if name == OF_HEADS else before[name]), name


def test_stock_sums_it(ranks2):
    """Else the test above could not fail."""
    first, second = ranks2.run(on_two_ranks, False, nothing, False)
    assert torch.equal(first[2][QUERY], first[1][QUERY] + second[1][QUERY])
    assert torch.equal(first[2][KEY], first[1][KEY])


@pytest.mark.parametrize(("change", "sequence_parallel"), [(frozen, False), (nothing, True)])
def test_what_is_right_on_stock_stays_as_it_is(ranks2, change, sequence_parallel):
    """A frozen norm has no gradient. Under sequence parallelism each rank has some of the tokens."""
    found = ranks2.run(on_two_ranks, True, change, sequence_parallel)
    stock = ranks2.run(on_two_ranks, False, change, sequence_parallel)
    for (sums, _, after), (expected_sums, before, expected) in zip(found, stock, strict=True):
        assert sums == expected_sums and sums
        assert all(torch.equal(after[name], expected[name]) for name in expected)
        assert (QUERY in expected and not torch.equal(expected[QUERY], before[QUERY])) == sequence_parallel
