"""gathered-logits-loss: gathered logits train as their parts, to the bit, and what stock does right stays."""

import pytest
import torch

import shim
from shim import testing
from shim.patches.megatron_core.gathered_logits_loss.proof import TOKENS, trained
from shim.testing import Layout

CELLS = {"0.17.0": "all"}

ID = "gathered-logits-loss"
pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not shim.plan()[ID].wanted, reason="this release needs no patch"),
]
PLAIN = {"mtp_num_layers": None}
FUSED = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}
MODELS = {
    "plain": PLAIN,
    "untied": {**PLAIN, "share_embeddings_and_output_weights": False},
    "MTP": {"mtp_num_layers": 1},
    "fused": {**PLAIN, **FUSED},
    "recompute": {**PLAIN, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def equal(mine, other):
    (losses, grads), (right, right_grads) = mine, other
    return torch.equal(losses, right) and all(torch.equal(grads[name], grad) for name, grad in right_grads.items())


def same_when_gathered(options, ids, sequence_parallel):
    """On this rank, under the patches `ids`."""
    layout = Layout(tp=2, sequence_parallel=sequence_parallel)
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), torch.compiler.set_stance("force_eager"):
        with shim.patched(only=ids, require=[ID] if ID in ids else []):
            options = {**options, "sequence_parallel": sequence_parallel}
            return equal(trained(True, **options), trained(False, **options))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2+sp"])
@pytest.mark.parametrize("name", MODELS)
def test_gathered_logits_train_as_their_parts(ranks2, name, sequence_parallel):
    if sequence_parallel and testing.release().startswith("0.12"):
        pytest.skip("up to 0.12 the output layer asserts that sequence parallelism is off if it gathers")
    given = MODELS[name], [ID], sequence_parallel
    assert ranks2.run(same_when_gathered, *given) == [True, True]


@pytest.mark.parametrize("name", ["plain", "MTP", "fused"])
def test_beside_all_other_patches(ranks2, name):
    ids = [id for id, decision in shim.plan().decisions.items() if decision.wanted]
    assert ranks2.run(same_when_gathered, MODELS[name], ids, False) == [True, True]


def test_stock_is_wrong(ranks2):
    assert ranks2.run(same_when_gathered, PLAIN, [], False) == [False, False]


def parts_are_passed_on(sequence_parallel):
    """On this rank: whether stock and the patch give the same bits for logits that nobody gathers."""
    layout = Layout(tp=2, sequence_parallel=sequence_parallel)
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        stock = trained(False, sequence_parallel=sequence_parallel)
        with shim.patched(only=[ID], require=[ID]):
            return equal(trained(False, sequence_parallel=sequence_parallel), stock)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2+sp"])
def test_parts_are_passed_on(ranks2, sequence_parallel):
    assert ranks2.run(parts_are_passed_on, sequence_parallel) == [True, True]


def test_on_one_rank_nothing_changes():
    """What is gathered from one rank is not cut. In fp32 stock cannot train it; chunked-logprob can if asked."""
    stock = trained(False)
    with shim.patched(only=[ID], require=[ID]):
        assert equal(trained(False), stock)
    with shim.patched(only=["chunked-logprob"], require=["chunked-logprob"]):
        right = trained(True)
    with shim.patched(only=[ID, "chunked-logprob"], require=[ID], rounding=True):
        assert equal(trained(True), right)


def built_to_gather():
    """On this rank, a model whose output layer gathers of itself, as parallel_output=False builds it."""
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(tp=2)):
        with shim.patched(only=[ID], require=[ID]):
            model = testing.build_gpt(**PLAIN)
            row = torch.arange(TOKENS)[None]
            right = model(row, row, None, labels=row)
            model.output_layer.gather_output = True
            return torch.equal(model(row, row, None, labels=row), right)


def test_a_model_that_always_gathers(ranks2):
    assert ranks2.run(built_to_gather) == [True, True]
