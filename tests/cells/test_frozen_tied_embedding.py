"""frozen-tied-embedding: what is frozen is left out, and an embedding that is trained is summed as on stock."""

import contextlib

import pytest
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

import shim
from shim import testing
from shim.patches.megatron_core.frozen_tied_embedding.proof import training

CELLS = {"0.12.0": "all"}

ID = "frozen-tied-embedding"
NEEDED = shim.plan()[ID].wanted
MTP = {"mtp_num_layers": 1}
UNTIED = {"share_embeddings_and_output_weights": False}


def applied():
    return shim.patched(only=[ID], require=[ID]) if NEEDED else contextlib.nullcontext()


def summed(frozen, **options):
    """The gradient of this stage's copy of the embedding after finalize_model_grads; (rank + 1) before."""
    model = testing.build_gpt(**{"mtp_num_layers": None, **options})
    model.requires_grad_(not frozen)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    weight = model.shared_embedding_or_output_weight()
    if not frozen:
        weight.main_grad.fill_(parallel_state.get_pipeline_model_parallel_rank() + 1)
    finalize_model_grads([wrapped])
    return None if frozen else weight.main_grad.unique().tolist()


def on_stages(frozen, options):
    """What `summed` gives on this stage, on stock and with the patch."""
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(pp=2)):
        stock = None if frozen else summed(frozen, **options)  # stock raises
        with applied():
            return stock, summed(frozen, **options)


def trained(pp, options):
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(pp=pp)), applied():
        return training(**options)


@pytest.mark.parametrize(
    ("options", "expected"), [({}, [3, 3]), (MTP, [3, 3]), (UNTIED, [1, 2])], ids=["tied", "mtp", "untied"]
)
def test_what_stock_does_right_stays(ranks2, options, expected):
    """Where an embedding is trained, the copies of both stages have the sum. Without copies nothing is summed."""
    assert ranks2.run(on_stages, False, options) == [([value], [value]) for value in expected]


@pytest.mark.parametrize("options", [{}, MTP, UNTIED], ids=["tied", "mtp", "untied"])
def test_what_is_frozen_is_left_out(ranks2, options):
    assert ranks2.run(on_stages, True, options) == [(None, None)] * 2


def test_adapters_learn_beside_multi_token_prediction_too(ranks2):
    with testing.layout_initialised(testing.Layout()), applied():
        expected = training(**MTP)
    for found in ranks2.run(trained, 2, MTP):
        assert found == pytest.approx(expected, rel=1e-5)


def test_one_stage_alone_has_nothing_to_sum():
    with testing.layout_initialised(testing.Layout()), applied():
        assert summed(frozen=True) is None
        assert summed(frozen=False) == [1.0]
