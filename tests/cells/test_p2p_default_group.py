"""p2p-default-group: shapes go over the group of the tensors, in the messages of stock."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import p2p_communication
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core.p2p_default_group.proof import LENGTHS, losses_on_rank
from shim.testing import Layout

CELLS = {"0.12.3": "all"}

ID = "p2p-default-group"
pytestmark = needed(ID)
METHOD = hasattr(p2p_communication, "P2PCommunicator")


class Batches:
    """The batches of messages inside, as (operation, elements, dtype, peer) each, and the groups of all messages."""

    def __init__(self):
        self.batches, self.groups = [], set()

    def __enter__(self):
        self._batch = dist.batch_isend_irecv
        dist.batch_isend_irecv = self._recorded
        return self

    def __exit__(self, *exception):
        dist.batch_isend_irecv = self._batch

    def _recorded(self, ops):
        self.batches.append([(op.op.__name__, op.tensor.numel(), op.tensor.dtype, op.peer) for op in ops])
        self.groups |= {op.group for op in ops}
        return self._batch(ops)


def applied():
    return shim.patched(only=[ID], require=[ID])


def steps_on_rank():
    """Of a step on stock and of one with the patch: losses and messages, and whether all went over the pipeline
    group."""
    found = []
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(pp=2)):
        group = parallel_state.get_pipeline_model_parallel_group()
        for ids in ([], [ID]):
            with shim.patched(only=ids, require=ids), Batches() as sent:
                losses = losses_on_rank(2)
            found.append((losses, sent.batches, sent.groups == {group}))
    return found


def test_the_messages_are_those_of_stock_over_another_group(ranks2):
    for (losses, messages, before), (patched_losses, patched_messages, after) in ranks2.run(steps_on_rank):
        assert (before, after) == (False, True)
        assert patched_losses == losses
        assert patched_messages == messages
        shapes = [message for batch in messages for message in batch if message[2] is torch.int64]
        assert len(shapes) == 2 * len(LENGTHS)


def other_group_on_rank():
    """Groups of the messages where a trainer sends tensors over the default group."""
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(pp=2)):
        original = p2p_communication._batched_p2p_ops

        def over_default_group(**kwargs):
            return original(**{**kwargs, "group": None})

        with mock.patch.object(p2p_communication, "_batched_p2p_ops", over_default_group), shim.patched(only=[ID]):
            with Batches() as sent:
                losses_on_rank(2)
        return len(sent.groups), parallel_state.get_pipeline_model_parallel_group() in sent.groups


def test_shapes_follow_the_tensors_to_another_group(ranks2):
    for groups in ranks2.run(other_group_on_rank):
        assert groups == (1, False)


def shapes_of(tensor, config):
    """What a rank without neighbours of its own gets, by names."""
    given = {"tensor_send_next": tensor, "tensor_send_prev": None, "recv_prev": True, "recv_next": False}
    if METHOD:
        group = parallel_state.get_pipeline_model_parallel_group()
        return p2p_communication.P2PCommunicator(group, config)._communicate_shapes(**given)
    return p2p_communication._communicate_shapes(**given, config=config)


def test_ring_exchange_and_errors_are_those_of_stock():
    config = SimpleNamespace(use_ring_exchange_p2p=True, virtual_pipeline_model_parallel_size=None)

    def ring_exchange(tensor_recv_prev, tensor_send_next, **others):
        tensor_recv_prev.copy_(tensor_send_next)

    with testing.layout_initialised(Layout()), applied():
        with mock.patch.object(dist, "ring_exchange", ring_exchange, create=True):
            assert shapes_of(torch.empty(2, 3, 4), config) == ([2, 3, 4], [0, 0, 0])
        config.use_ring_exchange_p2p = False
        with (
            mock.patch.object(dist, "batch_isend_irecv", side_effect=ConnectionError("lost")),
            mock.patch.object(dist, "P2POp"),
            pytest.raises(ConnectionError, match="lost"),
        ):
            shapes_of(torch.empty(2, 3, 4), config)
