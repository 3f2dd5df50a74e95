"""Patch mtp-packed-sequences under context parallelism: roll_tensor itself, on any row, group and partition.

Gradients, messages and errors of the roll are those of tests/ops/test_context_parallel_roll.py.
"""

import megatron.core.transformer.multi_token_prediction as mtp
import pytest
import torch
import torch.distributed as dist
from context_parallel_cases import (
    CP2,
    CP4,
    ID,
    apply_in_rank,
    cp_group,
    in_layout,
    params,
    places_of,
    rank_of,
    rolls_in_rank,
    whole_and_rolled,
)

import shim
from shim.ops import rank_roll_index, roll_on_rank
from shim.testing import Layout

CELLS = {"0.13.1": "all"}

ABOUT = ["mtp-packed-sequences"]  # the patches, see chosen.py


@pytest.fixture(scope="module", autouse=True)
def stock_again(ranks2, ranks4):
    """Other modules use the same ranks."""
    yield
    for ranks in (ranks2, ranks4):
        ranks.run(apply_in_rank, [], {})


# In slots that two and four ranks share out evenly: empty sequences (first, in the middle, last), of one token, of
# one and of no token a rank, shares of odd length, padding, and rows of nothing.
SHORT_ROWS = [
    ((0, 8), None),
    ((0, 0, 16), None),
    ((0, 8, 8, 8, 24, 24), None),
    ((0, 4, 8), None),
    ((0, 4, 16, 28), None),
    ((0, 12, 24), None),
    ((0, 1, 2), (0, 4, 8)),
    ((0, 1, 1, 8), (0, 8, 16, 24)),
    ((0, 5, 18, 21), (0, 8, 24, 32)),
    ((0, 3, 7), (0, 8, 12)),
    ((0, 0), (0, 8)),
    ((0, 0), None),
    ((0,), None),
]
SHAPES = [((), ()), ((1,), ()), ((), (1, 3)), ((2,), (3,))]


@pytest.mark.parametrize("world", [2, 4])
def test_a_share_of_the_rolled_row_is_the_roll_of_the_share(ranks2, ranks4, world):
    """Whatever the sequences, dtype, rank and dimension; cu_seqlens (0, 2, 16) is one token a rank on two ranks."""
    ranks, layout = (ranks2, CP2) if world == 2 else (ranks4, CP4)
    rows = [*SHORT_ROWS, ((0, 2, 16), None), ((0, 2, 4, 10), None)] if world == 2 else SHORT_ROWS
    for wrong in ranks.run(rolls_in_rank, layout, rows, [torch.int64, torch.float32], SHAPES):
        assert not wrong, wrong
    dtypes = [torch.bool, torch.int32, torch.uint8, torch.float64, torch.bfloat16, torch.float16]
    for wrong in ranks.run(rolls_in_rank, layout, [((0, 5, 18, 21), (0, 8, 24, 32))], dtypes, SHAPES[:2]):
        assert not wrong, wrong


def eight_bit_in_rank():
    """The eight-bit floats have no sum, which roll_tensor returns: the roll itself, on the bytes of a row."""
    with in_layout(CP2):
        whole, expected = whole_and_rolled((0, 5, 13), (0, 8, 16), torch.uint8)
        group, cu = cp_group(), torch.tensor([[0, 5, 13], [0, 8, 16]])
        places = places_of([8, 16], rank_of(group), 2)
        index = rank_roll_index(*cu, 8, "cpu", rank_of(group), 2)
        rolled = roll_on_rank(whole[places].view(torch.float8_e4m3fn), index, 0, group)
        return torch.equal(rolled.view(torch.uint8), expected[places])


def test_eight_bit_floats_travel_as_bytes(ranks2):
    assert ranks2.run(eight_bit_in_rank) == [True, True]


# The group of the row


def own_group_in_rank(world_layout, size):
    """A roll of a row whose cp_group has `size` ranks, in a layout of another size; True where it is right."""
    with in_layout(world_layout):
        me, world = dist.get_rank(), dist.get_world_size()
        groups = [dist.new_group(list(range(start, start + size))) for start in range(0, world, size)]
        own = groups[me // size]
        whole, expected = whole_and_rolled((0, 5, 13), (0, 8, 16), torch.int64)
        places = places_of([8, 16], rank_of(own), size)
        row = params((0, 5, 13), (0, 8, 16), own)
        rolled, _ = mtp.roll_tensor(whole[places], shifts=-1, dims=-1, cp_group=cp_group(), packed_seq_params=row)
        dist.barrier()
        dist.destroy_process_group(own)
        return torch.equal(rolled, expected[places])


@pytest.mark.parametrize(("layout", "size"), [(CP2, 1), (Layout(), 2)], ids=["local-in-cp2", "two-in-cp1"])
def test_the_group_of_a_row_wins_over_that_of_the_model(ranks2, layout, size):
    """Dynamic context parallelism: cp_group of the row says over how many ranks this row is cut, this one or more."""
    assert ranks2.run(own_group_in_rank, layout, size) == [True, True]


def test_a_row_can_be_cut_over_some_of_the_ranks(ranks4):
    """Four ranks in the model's group, two in the row's: neighbours are those of the row."""
    assert ranks4.run(own_group_in_rank, CP4, 2) == [True] * 4


# How a row is cut


@pytest.mark.parametrize("world", [2, 4])
def test_a_row_can_be_cut_as_a_whole(ranks2, ranks4, world):
    """Option partition="row": zigzag over the row, wherever sequences begin, so slots need not be divisible."""
    rows = [((0, 16), None), ((0, 5, 9, 16), None), ((0, 3, 3, 4, 16, 32), None), ((0, 5, 12), (0, 7, 16))]
    arguments = (Layout(cp=world), rows, [torch.int64, torch.float32], SHAPES, True, "row")
    for wrong in (ranks2 if world == 2 else ranks4).run(rolls_in_rank, *arguments):
        assert not wrong, wrong


def test_another_partition_is_refused():
    with pytest.raises((ValueError, shim.ShimError), match=r"partition.*'blocks'.*sequence.*row"):
        with shim.patched(only=[ID], options={ID: {"partition": "blocks"}}):
            pass
