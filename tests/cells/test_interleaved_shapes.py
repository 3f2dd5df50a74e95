"""interleaved-shapes: which stages are told to exchange in one call, and four stages that train as one."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

import shim
from shim import testing
from shim.patches.megatron_core import interleaved_shapes
from shim.patches.megatron_core._proof_pipelines import losses_on_rank
from shim.patches.megatron_core.interleaved_shapes.proof import VARIABLE
from shim.testing import Layout

CELLS = {"0.16.0": "all"}

ID = "interleaved-shapes"
VARIANT = shim.plan()[ID].variant
BESIDE = [id for id in ("p2p-default-group", "pipeline-p2p-order", "pipeline-send-buffers") if shim.plan()[id].wanted]
pytestmark = pytest.mark.skipif(VARIANT is None, reason="this release needs no patch")

LENGTHS = (6, 10, 8, 4)


def config_of(**fields):
    given = {"variable_seq_lengths": True, "overlap_p2p_comm": False, "use_ring_exchange_p2p": False, **fields}
    return SimpleNamespace(**given)


def counts(size, rank, chunks, microbatches, config, forward_only=False, group=None):
    """What upstream's function, or the patch, says of a stage: total, all in the warm-up, warm-up, remaining."""
    given = {
        "num_microbatches": microbatches,
        "num_model_chunks": chunks,
        "microbatch_group_size_per_vp_stage": group or size,
        "forward_only": forward_only,
    }
    with contextlib.ExitStack() as stack:
        if VARIANT == "v0_14":
            ranks = SimpleNamespace(size=lambda: size, rank=lambda: rank)
            given["p2p_communicator"] = SimpleNamespace(
                pp_group=ranks, virtual_pipeline_model_parallel_size=chunks, config=config
            )
        else:
            values = {
                "get_pipeline_model_parallel_world_size": size,
                "get_pipeline_model_parallel_rank": rank,
                "get_virtual_pipeline_model_parallel_world_size": chunks,
            }
            for name, value in values.items():
                stack.enter_context(mock.patch.object(parallel_state, name, lambda value=value: value))
            stack.enter_context(mock.patch.object(interleaved_shapes._CONFIG, "value", config, create=True))
        return schedules.get_pp_rank_microbatches(**given)


@pytest.mark.parametrize(
    ("size", "chunks", "microbatches", "group", "changed"),
    [
        (2, 2, 2, 2, {0}),
        (2, 4, 2, 2, {0}),
        (2, 2, 4, 2, set()),
        (2, 2, 4, 4, set()),
        (3, 2, 3, 3, set()),
        (3, 2, 4, 4, {0}),
        (4, 2, 4, 4, {1}),
        (4, 2, 5, 5, set()),
        (4, 3, 6, 6, {0}),
        (8, 2, 8, 8, {3}),
        (8, 2, 16, 8, set()),
    ],
)
def test_stages_whose_passes_are_exactly_their_warm_up(size, chunks, microbatches, group, changed):
    found = set()
    for rank in range(size):
        stock = counts(size, rank, chunks, microbatches, config_of(), group=group)
        with shim.patched(only=[ID], require=[ID]):
            patched = counts(size, rank, chunks, microbatches, config_of(), group=group)
        assert patched[::2] == stock[::2] and patched[3] == stock[3]
        if patched[1] != stock[1]:
            found.add(rank)
            assert stock[1] and not patched[1] and patched[3] == 0
    assert found == changed


@pytest.mark.parametrize(
    ("fields", "forward_only"),
    [
        ({}, True),
        ({"variable_seq_lengths": False}, False),
        ({"overlap_p2p_comm": True}, False),
        ({"use_ring_exchange_p2p": True}, False),
        ({"overlap_moe_expert_parallel_comm": True}, False),
    ],
)
def test_what_stock_does_right_stays(fields, forward_only):
    stock = counts(2, 0, 2, 2, config_of(**fields), forward_only)
    with shim.patched(only=[ID], require=[ID]):
        assert counts(2, 0, 2, 2, config_of(**fields), forward_only) == stock
    assert stock[1]


def step_on_rank(layout, options):
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        with shim.patched(only=[ID, *BESIDE], require=[ID, *BESIDE]):
            losses = losses_on_rank(LENGTHS, {**VARIABLE, "num_layers": 8, **options}, 2)
            return losses, interleaved_shapes._CONFIG.value


@pytest.mark.parametrize(
    "options",
    [{}, {"deallocate_pipeline_outputs": True, "batch_p2p_comm": False}],
    ids=["batched", "unbatched"],
)
def test_four_stages_train_as_one(ranks4, options):
    """Over two steps, beside the other patches of messages."""
    (*_, (found, _)) = left = ranks4.run(step_on_rank, Layout(pp=4, vp=2), options)
    assert found == pytest.approx(step_on_rank(Layout(), {})[0], rel=1e-6)
    assert [config for _, config in left] == [None] * 4
