"""broadcast-data-group: sizes go over the group of the call, in as many messages as on stock."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import data as upstream
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core.broadcast_data_group.proof import row_of
from shim.testing import Layout

CELLS = {"0.14.0": "all"}

ID = "broadcast-data-group"
pytestmark = needed(ID)


@contextlib.contextmanager
def messages():
    """The groups and sizes of all broadcasts inside."""
    found, broadcast = [], dist.broadcast

    def counting(tensor, *args, **kwargs):
        found.append((kwargs["group"], tensor.numel()))
        return broadcast(tensor, *args, **kwargs)

    dist.broadcast = counting
    try:
        yield found
    finally:
        dist.broadcast = broadcast


def sent(keys, data, **group):
    return tensor_parallel.broadcast_data(keys, data, torch.int64, **group)


def applied():
    return shim.patched(only=[ID], require=[ID])


def default_group_on_rank():
    """(same values, same messages) as on stock, without a group and with the global one, for two tensors."""
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(tp=2)):
        group = parallel_state.get_tensor_model_parallel_group()
        data = {"a": torch.arange(6).reshape(2, 3), "b": row_of(1)} if dist.get_rank() == 0 else None
        found = []
        for given in ({}, {"tp_group": None}, {"tp_group": group}):
            with messages() as before:
                expected = sent(["a", "b"], data, **given)
            with applied(), messages() as after:
                values = sent(["a", "b"], data, **given)
            found.append((all(torch.equal(values[key], expected[key]) for key in expected), before == after))
        return found


def test_what_stock_does_right_stays(ranks2):
    for found in ranks2.run(default_group_on_rank):
        assert all(values and messages for values, messages in found)


def errors_on_rank():
    """Sends over a group of this rank alone, by position, with errors in between."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    mine, rank = groups[dist.get_rank()], dist.get_rank()
    try:
        # No global group is there: a trainer with groups of its own needs none.
        with testing.megatron_on_cpu(), applied():
            found = [
                torch.equal(upstream.broadcast_data(["a"], {"a": row_of(rank)}, torch.int64, mine)["a"], row_of(rank))
            ]
            with pytest.raises(KeyError):
                sent(["b"], {"a": row_of(rank)}, tp_group=mine)
            with pytest.raises(AssertionError, match="data type"):
                sent(["a"], {"a": row_of(rank).float()}, tp_group=mine)
            # The group of a call that failed is forgotten: the global one is asked for, which is not there.
            with pytest.raises((AssertionError, AttributeError), match=r"not initialized|'NoneType' object"):
                upstream._build_key_size_numel_dictionaries(["a"], {"a": row_of(rank)})
            with messages() as after:
                sent(["a"], {"a": row_of(rank)}, tp_group=mine)
            found.append([group is mine for group, _ in after] == [True, True])
    finally:
        dist.destroy_process_group(mine)
    return found


def test_errors_and_groups_without_a_global_one(ranks2):
    for found in ranks2.run(errors_on_rank):
        assert all(found)
