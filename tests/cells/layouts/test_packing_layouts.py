"""The shares of a packed batch under context parallelism: those that a real model trains on, and back to the batch."""

import torch
import torch.distributed as dist
from packing_cases import alignment_of, row_of, worst_of

import shim
from shim import testing
from shim.testing import Layout

CELLS = {"0.13.1": "all"}

ABOUT = ["mtp-packed-sequences"]  # the patches, see chosen.py

ID = "mtp-packed-sequences"
PATCHES = [ID, "mtp-loss-cp"]
LENGTHS, WIDTH = (5, 9, 0, 3, 12), 12


def on_rank(layout, recipes):
    """For each recipe (tokens of the rank, whether they are the model's, whether all come back, difference)."""
    from megatron.core import parallel_state

    found = []
    with testing.megatron_on_cpu(), shim.patched(only=PATCHES, require=PATCHES), testing.layout_initialised(layout):
        model, seen = testing.build_gpt(sequence_parallel=layout.sequence_parallel), []
        model.register_forward_pre_hook(lambda _, args, given: seen.append(given["input_ids"][0]), with_kwargs=True)
        for recipe in recipes:
            row, packing, ids = row_of(LENGTHS, WIDTH, alignment=alignment_of(recipe, layout), cp=layout.cp)
            packed = packing.on_rank(parallel_state.get_context_parallel_rank()).pack(ids)
            shares = [torch.empty_like(packed) for _ in range(layout.cp)]
            dist.all_gather(shares, packed, group=parallel_state.get_context_parallel_group())
            seen.clear()
            worst = worst_of(model, row)  # runs the packed row first
            back = packing.unpack(packing.merge(shares))
            came_back = torch.equal(back, ids * packing.attention_mask)
            found.append((len(packed), torch.equal(packed, seen[0]), came_back, worst))
    return found


def check(ranks, layout, lengths):
    for found in ranks.run(on_rank, layout, ["delayed", "blockwise"][: len(lengths)]):
        assert [length for length, *_ in found] == lengths
        for _, trained_on, came_back, worst in found:
            assert trained_on and came_back and worst <= 1e-6


def test_a_rank_trains_on_its_share(ranks2):
    check(ranks2, Layout(cp=2), [32, 128])


def test_a_rank_trains_on_its_share_under_sequence_parallelism(ranks4):
    check(ranks4, Layout(tp=2, cp=2, sequence_parallel=True), [32])
