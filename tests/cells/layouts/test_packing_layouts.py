"""The shares of a packed batch under context parallelism: those that a real model trains on, and back to the batch."""

import pytest
import torch
import torch.distributed as dist
from packing_cases import alignment_of, row_of, worst_of

import shim
from shim import testing
from shim.testing import Layout

ID = "mtp-packed-sequences"
LENGTHS, WIDTH = (5, 9, 0, 3, 12), 12


def on_rank(layout, recipe):
    """(the rank's share of ids, those that run_packed gives the model, the batch from all shares, difference)."""
    from megatron.core import parallel_state

    with testing.megatron_on_cpu(), shim.patched(only=[ID], require=[ID]), testing.layout_initialised(layout):
        row, packing, ids = row_of(LENGTHS, WIDTH, alignment=alignment_of(recipe, layout), cp=layout.cp)
        share = packing.on_rank(parallel_state.get_context_parallel_rank())
        packed = share.pack(ids)
        shares = [torch.empty_like(packed) for _ in range(layout.cp)]
        dist.all_gather(shares, packed, group=parallel_state.get_context_parallel_group())
        model = testing.build_gpt(sequence_parallel=layout.sequence_parallel)
        seen = []
        undo = model.register_forward_pre_hook(
            lambda _, args, given: seen.append(given["input_ids"][0]), with_kwargs=True
        )
        testing.run_packed(model, row)
        undo.remove()
        back = packing.unpack(packing.merge(shares))
        return packed, seen[0], torch.equal(back, ids * packing.attention_mask), worst_of(model, row)


@pytest.mark.parametrize(
    ("layout", "recipe"), [(Layout(cp=2), "delayed"), (Layout(cp=2), "blockwise")], ids=["delayed", "blockwise"]
)
def test_a_rank_trains_on_its_share(ranks2, layout, recipe):
    for packed, seen, came_back, worst in ranks2.run(on_rank, layout, recipe):
        assert torch.equal(packed, seen) and came_back
        assert worst <= 1e-6


def test_a_rank_trains_on_its_share_under_sequence_parallelism(ranks4):
    for packed, seen, came_back, worst in ranks4.run(on_rank, Layout(tp=2, cp=2, sequence_parallel=True), "delayed"):
        assert torch.equal(packed, seen) and came_back and len(packed) % 32 == 0
        assert worst <= 1e-6
