"""Pipelines on four ranks whose messages take their time: with shim each microbatch learns what it learns on one rank.

Microbatches have different lengths, outputs are freed as soon as upstream frees them, and the schedules are the
release's own.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from slow_messages import slow_messages

import shim
from shim import testing
from shim.patches.megatron_core._proof_pipelines import losses_on_rank
from shim.patches.megatron_core.pipeline_p2p_order.proof import DIFFERENT
from shim.testing import Layout

CELLS = {"0.16.1": "all"}

ABOUT = ["pipeline-p2p-order", "pipeline-send-buffers"]  # the patches, see chosen.py

PATCHES = [id for id in ("p2p-default-group", "pipeline-send-buffers", "pipeline-p2p-order") if shim.plan()[id].wanted]
# More microbatches than stages: with no more, stock hangs with variable_seq_lengths.
LENGTHS, STEPS, SEED = 2 * DIFFERENT, 2, 0
MODEL = {"num_layers": 8, "variable_seq_lengths": True}
FREED = {"deallocate_pipeline_outputs": True}
OVERLAP = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
SCHEDULES = {"1F1B": (Layout(pp=4), {}), "interleaved": (Layout(pp=4, vp=2), OVERLAP)}


def on_rank(ids, layout, options, steps=STEPS, longest=0.03):
    """The losses of the microbatches of some steps on the last stage."""
    applied = shim.patched(only=ids, require=ids) if ids else contextlib.nullcontext()
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), applied, slow_messages(SEED, longest):
        return losses_on_rank(LENGTHS, {**MODEL, **FREED, **options}, steps)


@pytest.fixture(scope="module")
def truth():
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout()):
        return losses_on_rank(LENGTHS, MODEL, STEPS)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_of_different_lengths_train_as_on_one_rank(ranks4, truth, schedule):
    assert ranks4.run(on_rank, PATCHES, *SCHEDULES[schedule])[-1] == pytest.approx(truth, rel=1e-6)


@pytest.mark.skipif("pipeline-send-buffers" not in PATCHES, reason="this release keeps its outputs")
def test_stock_sends_what_it_has_freed(ranks4, truth):
    # Messages slow enough that an output is gone before its message has left, on a busy machine too.
    found = ranks4.run(on_rank, [], *SCHEDULES["interleaved"], 1, 0.3)[-1]
    assert max(abs(mine - true) / true for mine, true in zip(found, truth[: len(LENGTHS)], strict=True)) > 1e-3


def what_luck_hides():
    """Of rank 1: a message that is looked at too early and again in time, and one whose sender does not keep it."""
    with slow_messages(SEED, longest=0.2):
        if dist.get_rank() == 0:
            kept, freed = torch.ones(2), torch.ones(2)
            works = [dist.isend(tensor, 1) for tensor in (kept, freed)]
            freed.data = torch.empty(0)
        else:
            first, second = torch.zeros(2), torch.zeros(2)
            works = [dist.irecv(tensor, 0) for tensor in (first, second)]
            early = first.tolist()
        for work in works:
            work.wait()
    return None if dist.get_rank() == 0 else (early, first.tolist(), second.tolist())


def test_what_works_by_luck_fails(ranks2):
    assert ranks2.run(what_luck_hides)[1] == ([0, 0], [1, 1], [-1, 1])
