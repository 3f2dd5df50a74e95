"""dp-reshardable-empty-bucket: any ranks save and load, in front of and between weights, and the file is stock's."""

from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
from needed import needed
from thorough import times

import shim
from shim import testing
from shim.patches.megatron_core._proof_optimizer_resume import (
    STEPS,
    Training,
    apart,
    fused_adam,
    save_after,
    weights_after,
    weights_resumed,
)
from shim.patches.megatron_core.dp_reshardable_empty_bucket import STATE, bindings
from shim.patches.megatron_core.dp_reshardable_empty_bucket.proof import BY_DATA, SETTINGS

CELLS = {"0.17.0": "all"}

ID = "dp-reshardable-empty-bucket"
pytestmark = needed(ID)
EMPTY = "empty bucket encountered"
# With four ranks the second has nothing between two weights of a bucket, and the last has nothing behind them.
BETWEEN = {**SETTINGS, "bucket": 90}
# With four ranks the last has nothing at all.
NOTHING = {**SETTINGS, "bucket": 50}


def applied(*others):
    return shim.patched(only=[ID, *others], require=[ID, *others])


def in_layout(function, *args):
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout()):
        return function(*args)


def on(world, *args):
    """The results of so many ranks, which are replicas."""
    with testing.Ranks(world) as ranks:
        return ranks.run(in_layout, *args)


def truth(settings):
    return in_layout(weights_after, 2 * STEPS, BY_DATA, {"seed": 7, **settings})


def save(world, directory, settings=SETTINGS):
    on(world, save_after, STEPS, str(directory), BY_DATA, settings)


def resumed(world, directory, settings=SETTINGS):
    """How far each rank is from a training without a break."""
    right = truth(settings)
    return [apart(found, right) for found in on(world, weights_resumed, STEPS, str(directory), BY_DATA, settings)]


@pytest.mark.parametrize("saving, loading", times([(4, 2)], [(4, 2), (4, 4), (2, 4)]))
def test_padding_between_weights_and_behind_them(tmp_path, saving, loading):
    with applied():
        save(saving, tmp_path, BETWEEN)
        assert resumed(loading, tmp_path, BETWEEN) == [0] * loading


def test_stock_loads_the_file(tmp_path):
    """On one rank, which has something of each bucket."""
    with applied():
        save(2, tmp_path)
    assert resumed(1, tmp_path) == [0]


def test_a_rank_without_a_weight_of_a_whole_buffer(tmp_path):
    """All norms are in fp32, and each has a bucket: the second rank takes the names of its weights in bf16."""
    settings = {**SETTINGS, "mixed": True}
    with applied("dp-reshardable-fp32"):
        save(2, tmp_path, settings)
        assert resumed(2, tmp_path, settings) == [0, 0]


def with_torchs_adam(directory, load):
    """The weights after six steps; three of them, and a checkpoint, came before if it is loaded."""
    with mock.patch.object(numpy, "product", numpy.prod, create=True):  # up to 0.15 its sharding is for numpy 1
        if load:
            return Training(BY_DATA, **{**SETTINGS, "seed": 8}).load(directory).train(STEPS).weights()
        return Training(BY_DATA, **SETTINGS).train(STEPS).save(directory).train(STEPS).weights()


def test_torchs_adam_whose_states_have_a_step(tmp_path):
    """With the patch without which it cannot be loaded, and, in 0.15, not be saved."""
    with applied("cpu-offloaded-optimizer"):
        right, found = (on(2, with_torchs_adam, str(tmp_path), load) for load in (False, True))
    assert [apart(*pair) for pair in zip(found, right, strict=True)] == [0, 0]


def entries(settings):
    """Of this rank, by bucket: how long its entries are, and whether they are padding."""
    with fused_adam():
        inner = Training(BY_DATA, **settings).train(1).optimizer.chained_optimizers[0]
        state = inner.get_parameter_state_dp_reshardable()
    return [
        [(len(entry["exp_avg"]), entry.get("padding", False)) for entry in bucket]
        for number in range(len(inner.buffers))
        for buckets in state[number].values()
        for bucket in buckets
    ]


def test_only_empty_buckets_get_an_entry():
    """With the bytes of the share between weights, and none behind them."""
    stock = on(4, entries, BETWEEN)
    with applied():
        found = on(4, entries, BETWEEN)
    assert any(not bucket for rank in stock for bucket in rank)
    added = set()
    for rank, ours in zip(stock, found, strict=True):
        for before, after in zip(rank, ours, strict=True):
            assert after == before or not before
            added.update(after if not before else ())
    assert added == {(0, True), (32, True)}


def test_what_stock_does_right_stays():
    """One bucket that reaches all ranks: the very tensors of the optimizer."""
    settings = {**SETTINGS, "bucket": None}
    assert [len(rank) for rank in on(2, entries, settings)] == [1, 1]
    with testing.layout_initialised(testing.Layout()), fused_adam(), applied():
        inner = Training(BY_DATA, **settings).train(1).optimizer.chained_optimizers[0]
        [bucket] = [bucket for buckets in inner.get_parameter_state_dp_reshardable()[0].values() for bucket in buckets]
    ours = {id(weight) for group in inner.optimizer.param_groups for weight in group["params"]}
    assert {id(entry["param"]) for entry in bucket} == ours


@pytest.mark.parametrize("precision_aware", [False, True])
def test_entries_of_another_buffer_serve_if_their_dtypes_do(precision_aware):
    """The precision-aware optimizer may keep the main weights of one buffer as 16-bit remainders."""
    bucket = SimpleNamespace(grad_data=torch.empty(128), numel_unpadded=24)
    optimizer = SimpleNamespace(
        buffers=[SimpleNamespace(buckets=[bucket]), SimpleNamespace(buckets=[bucket])],
        data_parallel_group=SimpleNamespace(size=lambda: 2, rank=lambda: 1),
        config=SimpleNamespace(use_precision_aware_optimizer=precision_aware),
    )
    entry = {"param": torch.ones(24), "step": torch.ones(()), "gbuf_local_start": 0, "gbuf_local_end": 24}
    state = {0: {torch.float32: [[]]}, 1: {torch.bfloat16: [[entry]]}}
    filled = bindings("v0_15", {})[STATE](lambda self: state)(optimizer)
    [found] = filled[0][torch.float32]
    assert filled[1] == {torch.bfloat16: [[entry]]}
    if precision_aware:
        assert found == []
    else:  # at the end of the bucket, 24 - 64 behind the beginning of this rank's share
        [added] = found
        assert added.pop("param").shape == (0,)
        assert added == {"gbuf_local_start": -40, "gbuf_local_end": -40, "padding": True}


def test_a_rank_without_weights_raises_as_on_stock(tmp_path):
    with applied(), pytest.raises(testing.RankError) as raised:
        save(4, tmp_path, NOTHING)
    assert raised.value.rank == 3 and EMPTY in raised.value.remote_traceback
