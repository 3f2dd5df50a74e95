"""te-mxfp8-empty-shard: the scales are those of one rank that owns all, and what owns a shard is left alone."""

from importlib import import_module

import pytest
import torch
from needed import needed

import shim
from shim import testing
from shim.patches.transformer_engine._proof_mxfp8 import COLUMNS, ROWS, TENSOR, weight
from shim.patches.transformer_engine.te_mxfp8_empty_shard.proof import KERNELS, cast_shards
from shim.testing.transformer_engine import compiled_ops

CELLS = {"0.18.2+2.18.0": "all"}

ID = "te-mxfp8-empty-shard"
pytestmark = needed(ID)
ALL = ROWS * COLUMNS


@pytest.fixture
def one_rank():
    with testing.layout_initialised(testing.Layout()):
        yield


def on_ranks(world, function, *args):
    with testing.Ranks(world) as ranks:
        return ranks.run(in_layout, world, function, args)


def in_layout(world, function, args):
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(ep=world)):
        with shim.patched(only=[ID], require=[ID]):
            return function(*args)


@pytest.mark.parametrize("shards", [[None, (0, ALL)], [(0, 5000), None, (5000, ALL), None]])
def test_the_scales_are_those_of_one_rank_that_owns_all(shards):
    with testing.layout_initialised(testing.Layout()):
        right = cast_shards([(0, ALL)])
    assert len(set(right[0])) > 1
    for rank, (rows, columns, data) in enumerate(on_ranks(len(shards), cast_shards, shards)):
        assert (rows, columns) == (right[0], right[1])
        first, last = shards[rank] or (0, 0)
        assert data[first:last] == right[2][first:last]
        assert not any(data[:first] + data[last:])  # of others: they come by an all-gather


def test_what_stock_does_right_stays(one_rank):
    expected = cast_shards([(100, ALL)])
    with shim.patched(only=[ID], require=[ID]):
        assert cast_shards([(100, ALL)]) == expected


def test_stock_crashes_without_a_shard(one_rank):
    with pytest.raises(UnboundLocalError, match="master_weight_dtype"):
        cast_shards([None])


def test_a_weight_that_is_cut_gets_empty_parts(one_rank):
    """As Megatron-FSDP has it, which gives None for the parts of a rank that owns none."""
    cast = import_module(TENSOR + "utils").cast_master_weights_to_fp8
    with shim.patched(only=[ID], require=[ID]), testing.te_cuda_stand_ins(), compiled_ops(KERNELS):
        weights = [weight(), weight(128, 32)]
        cast(weights, [None] * 2, [None] * 2, torch.distributed.group.WORLD, [(None, None)] * 2)
    assert not any(each._rowwise_data.any() for each in weights)
