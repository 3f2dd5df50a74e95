"""The roll over context-parallel ranks against the same roll of the whole row, on real gloo ranks."""

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from rank_shares import offsets, places_of  # noqa: E402

from shim.ops import packed_roll  # noqa: E402
from shim.ops.context_parallel_roll import rank_roll_index, roll_on_rank  # noqa: E402
from shim.testing import Ranks  # noqa: E402

pytestmark = pytest.mark.usefixtures("mask_or_gaps")

ROWS = [  # (valid lengths, slot lengths); slots are multiples of 4, so that 2 and 4 ranks share them out
    ([8], [8]),
    ([8, 16, 8], [8, 16, 8]),
    ([5, 13, 1, 0, 8], [8, 16, 8, 8, 8]),
    ([0, 0], [0, 0]),
    ([0, 8, 0], [0, 8, 0]),
    ([4, 2, 12, 3], [4, 4, 12, 4]),  # local length 1 at 4 ranks, and odd ones
    ([], []),
]


def roll_here(ranks, partition):
    rank = dist.get_rank()
    for valid, slots in ROWS:
        total = sum(slots)
        cu, padded = offsets(valid), offsets(slots)
        places = places_of(total, slots, rank, ranks, partition)
        index = rank_roll_index(cu, padded, len(places), "cpu", rank, ranks, partition)
        for shape, dim in (((total,), 0), ((1, total, 3), 1), ((total, 2), -2)):
            row = torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape)
            expected = packed_roll(row, cu, padded, dim).index_select(dim, places)
            mine = row.index_select(dim, places).requires_grad_()
            rolled = roll_on_rank(mine, index, dim, dist.group.WORLD)
            assert torch.equal(rolled, expected), (valid, slots, shape, rolled, expected)
            weights = torch.arange(1.0, 1 + row.numel(), dtype=torch.float64).view(shape)
            whole = row.clone().requires_grad_()
            (packed_roll(whole, cu, padded, dim) * weights).sum().backward()
            if total:
                (rolled * weights.index_select(dim, places)).sum().backward()
                assert torch.equal(mine.grad, whole.grad.index_select(dim, places)), (valid, slots)
        flags = torch.arange(total) % 2 == 0
        rolled = roll_on_rank(flags[places], index, 0, dist.group.WORLD)
        assert torch.equal(rolled, packed_roll(flags, cu, padded)[places]) and rolled.dtype == torch.bool
    return True


def roll_with_tokens_behind(ranks):
    rank = dist.get_rank()
    index = rank_roll_index(offsets([7, 8]), offsets([8, 8]), 16 // ranks + 3, "cpu", rank, ranks)
    rolled = roll_on_rank(torch.ones(16 // ranks + 3), index, 0, dist.group.WORLD)
    return rolled[: 16 // ranks].sum().item(), rolled[16 // ranks :].tolist(), index.valid[16 // ranks :].tolist()


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_lies_behind_the_last_slot_is_zero_on_every_rank(ranks):
    with Ranks(ranks) as world:
        found = world.run(roll_with_tokens_behind, ranks)
    assert sum(total for total, _, _ in found) == 6 + 7
    assert all((behind, valid) == ([0, 0, 0], [False] * 3) for _, behind, valid in found)


@pytest.mark.parametrize("partition", ["sequence", "row"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_share_rolls_as_the_whole_row_does(ranks, partition):
    with Ranks(ranks) as world:
        assert world.run(roll_here, ranks, partition) == [True] * ranks


def count_messages(ranks, sequences):
    sent = []
    real = dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda operations: sent.extend(op.op.__name__ for op in operations) or real(operations)
    try:
        cu = offsets([4 * ranks] * sequences)
        length = 4 * sequences
        index = rank_roll_index(cu, None, length, "cpu", dist.get_rank(), ranks)
        roll_on_rank(torch.randn(length), index, 0, dist.group.WORLD)
    finally:
        dist.batch_isend_irecv = real
    return sent.count("isend"), sent.count("irecv")


def test_one_message_to_each_neighbour_whatever_the_number_of_sequences():
    with Ranks(4) as world:
        for sequences in (1, 64):
            assert world.run(count_messages, 4, sequences) == [(1, 1), (2, 2), (2, 2), (1, 1)]


def test_a_group_of_one_sends_nothing():
    """Of whatever kind it is: torch.distributed is not asked."""
    index = rank_roll_index(offsets([3, 5]), None, 8, "cpu", 0, 1)
    row = torch.arange(8)
    assert torch.equal(roll_on_rank(row, index, 0, object()), packed_roll(row, offsets([3, 5]), None))


def test_slots_that_cannot_be_shared_out_are_an_error():
    with pytest.raises(ValueError, match="multiple of the 2 ranks"):
        rank_roll_index(offsets([3, 5]), None, 4, "cpu", 0, 2)


def test_an_unknown_partition_is_an_error():
    with pytest.raises(ValueError, match="sequence, row"):
        rank_roll_index(offsets([4]), None, 2, "cpu", 0, 2, "contiguous")
