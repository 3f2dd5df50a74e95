"""pipeline-p2p-order: two stages get what is theirs, in the messages of stock; more stages get upstream's own calls."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import p2p_communication

import shim
from shim import testing
from shim.patches.megatron_core._proof_pipelines import STEPS, losses_on_rank
from shim.patches.megatron_core.pipeline_p2p_order import METHOD, bindings
from shim.patches.megatron_core.pipeline_p2p_order.proof import DIFFERENT, EQUAL
from shim.testing import Layout

CELLS = {"0.16.0": "all", "0.13.1": ["test_shapes_are_in_order_without_the_patch_of_their_group"]}

ID = "pipeline-p2p-order"
BESIDE = [id for id in ("p2p-default-group", "pipeline-send-buffers") if shim.plan()[id].wanted]
UNBATCHED = {"batch_p2p_comm": False}
FREED = {"deallocate_pipeline_outputs": True}
VARIABLE = {"variable_seq_lengths": True}
OVERLAP = {**UNBATCHED, "overlap_p2p_comm": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ACKNOWLEDGED = 7  # the tag of what a receiver answers


class Rendezvous:
    """Works of a batch as NCCL has them: a send is over when the other side has received, and a batch when all of its
    messages are; the next batch does not begin before."""

    def __init__(self, ops):
        self.works = []
        for op in ops:
            work = op.op(op.tensor, op.peer, group=op.group)
            answer = torch.zeros(1)
            if op.op is dist.isend:
                self.works += [work, dist.irecv(answer, op.peer, group=op.group, tag=ACKNOWLEDGED)]
            else:
                self.works.insert(0, Received(work, answer, op))

    def wait(self):
        for work in self.works:
            work.wait()
        self.works = []


class Received:
    def __init__(self, work, answer, op):
        self.work, self.answer, self.op = work, answer, op

    def wait(self):
        self.work.wait()
        dist.send(self.answer, self.op.peer, group=self.op.group, tag=ACKNOWLEDGED)


@contextlib.contextmanager
def batches(rendezvous=False):
    """What each batch holds, as (operation, elements, peer); with `rendezvous` it takes as long as NCCL's."""
    found, batch = [], dist.batch_isend_irecv

    def recorded(ops):
        found.append([(op.op.__name__, op.tensor.numel(), op.peer) for op in ops])
        return [Rendezvous(ops)] if rendezvous else batch(ops)

    with mock.patch.object(dist, "batch_isend_irecv", recorded):
        yield found


def on_rank(ids, layout, lengths, options, rendezvous=False, steps=STEPS):
    """Losses of some steps and their batches."""
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), shim.patched(only=ids, require=ids):
        with batches(rendezvous) as found:
            return losses_on_rank(lengths, options, steps), found


def truth(lengths, options):
    with testing.layout_initialised(Layout()):
        return losses_on_rank(lengths, {name: value for name, value in options.items() if name in VARIABLE})


@pytest.mark.parametrize(
    "lengths, options",
    [
        (DIFFERENT, {**VARIABLE, **FREED}),
        (DIFFERENT, {**VARIABLE, **UNBATCHED, **FULL}),
        (DIFFERENT, {**VARIABLE, **OVERLAP, **FREED}),
    ],
    ids=["batched", "unbatched-recompute", "overlap"],
)
def test_two_stages_train_as_one(ranks2, lengths, options):
    """Also where a send waits for its receiver, and beside the other patches of these functions."""
    found = ranks2.run(on_rank, [ID, *BESIDE], Layout(pp=2, vp=2), lengths, options, True)
    assert found[-1][0] == pytest.approx(truth(lengths, options), rel=1e-6)


@pytest.mark.skipif("p2p-default-group" not in BESIDE, reason="shapes are upstream's own here")
def test_shapes_are_in_order_without_the_patch_of_their_group(ranks2):
    """p2p-default-group takes the function's place, so that the fix of upstream's own needs a run without it."""
    found = ranks2.run(on_rank, [ID], Layout(pp=2, vp=2), DIFFERENT, VARIABLE, True)
    assert found[-1][0] == pytest.approx(truth(DIFFERENT, VARIABLE), rel=1e-6)


@pytest.mark.parametrize(
    "layout, lengths, options",
    # Stock hangs with variable_seq_lengths where there are no more microbatches than stages.
    [(Layout(pp=4, vp=2), 2 * DIFFERENT, {**VARIABLE, "num_layers": 8}), (Layout(pp=2, vp=2), EQUAL, {})],
    ids=["four", "two"],
)
def test_the_messages_are_those_of_stock(ranks2, ranks4, layout, lengths, options):
    """Stock is right with four. With two, all messages have one size here, so that their order cannot be told."""
    ranks = ranks4 if layout.pp == 4 else ranks2
    patched, stock = (ranks.run(on_rank, ids, layout, lengths, options, False, 1) for ids in ([ID], []))
    for (losses, messages), (stock_losses, stock_messages) in zip(patched, stock, strict=True):
        assert messages == stock_messages
        assert losses == stock_losses or layout.pp == 2


def test_ring_exchange_gets_what_it_is_given():
    """A rank alone is its own neighbour on both sides."""
    given = {"tensor_send_next": torch.empty(1, 2, 3), "tensor_send_prev": torch.empty(4, 5, 6)}
    config = SimpleNamespace(use_ring_exchange_p2p=True, virtual_pipeline_model_parallel_size=None)
    seen = {}
    with testing.layout_initialised(Layout()), shim.patched(only=[ID], require=[ID]):
        with mock.patch.object(dist, "ring_exchange", lambda **tensors: seen.update(tensors), create=True):
            if hasattr(p2p_communication, "P2PCommunicator"):
                group = parallel_state.get_pipeline_model_parallel_group()
                communicate = p2p_communication.P2PCommunicator(group, config)._communicate_shapes
                communicate(**given, recv_prev=False, recv_next=False)
            else:
                p2p_communication._communicate_shapes(**given, recv_prev=False, recv_next=False, config=config)
    assert seen["tensor_send_next"].tolist() == [1, 2, 3]
    assert seen["tensor_send_prev"].tolist() == [4, 5, 6]


@pytest.mark.parametrize(
    ("neighbours", "ring", "swapped"), [((1, 1), False, True), ((1, 2), False, False), ((1, 1), True, False)]
)
def test_shapes_change_places_only_between_two_stages(neighbours, ring, swapped):
    """With more of them each message has a rank of its own, and a ring exchange tells the sides apart."""

    def upstreams(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next):
        return tensor_send_next, tensor_send_prev

    prev_rank, next_rank = neighbours
    config = SimpleNamespace(use_ring_exchange_p2p=ring)
    communicator = SimpleNamespace(prev_rank=prev_rank, next_rank=next_rank, config=config)
    patched = bindings("v0_14", {})[METHOD](upstreams)
    assert patched(communicator, "next", "prev", True, True) == (("prev", "next") if swapped else ("next", "prev"))
