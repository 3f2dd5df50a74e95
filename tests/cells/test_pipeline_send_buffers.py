"""pipeline-send-buffers: an output lives until its message has left, and no longer, for no message more than stock."""

import gc
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication, schedules
from torch.multiprocessing.reductions import StorageWeakRef

import shim
from shim import testing
from shim.patches.megatron_core.pipeline_send_buffers.proof import chunks, late_messages, step
from shim.testing import Layout

CELLS = {"0.12.3": "all"}

ID = "pipeline-send-buffers"
NEEDED = shim.plan()[ID].wanted
needed = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")
FLUSH = {"overlap_p2p_comm_warmup_flush": True}
FREED = {"deallocate_pipeline_outputs": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def applied():
    ids = [ID] if NEEDED else []
    return shim.patched(only=ids, require=ids)


class Sent:
    """The memory of a message, and whether somebody has waited for it."""

    def __init__(self, work, tensor):
        self.work, self.memory, self.waited = work, StorageWeakRef(tensor.untyped_storage()), False

    def wait(self):
        self.waited = True
        return self.work.wait()


def memory_of_a_step(options):
    """Of a step over gloo as it is: messages, those that lost their memory before anybody waited for them, and those
    whose memory is there after the step."""
    sent, lost, isend, free = [], set(), dist.isend, schedules.deallocate_output_tensor

    def watched_isend(tensor, dst, group):
        work = Sent(isend(tensor, dst=dst, group=group), tensor)
        sent.append(work)
        return work

    def watched_free(*args, **kwargs):
        free(*args, **kwargs)
        lost.update(index for index, each in enumerate(sent) if not each.waited and each.memory.expired())

    model = chunks(**FREED, **options)
    with (
        mock.patch.object(dist, "isend", watched_isend),
        mock.patch.object(schedules, "deallocate_output_tensor", watched_free),
    ):
        step(model)
    for each in sent:
        each.work = None
    gc.collect()
    return len(sent), len(lost), sum(not each.memory.expired() for each in sent)


def memory_on_rank(options):
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(pp=2, vp=2)):
        stock = memory_of_a_step(options)
        with applied():
            return stock, memory_of_a_step(options)


@pytest.mark.parametrize("options", [{}, FLUSH], ids=["overlap", "warmup_flush"])
def test_an_output_lives_until_its_message_has_left_and_no_longer(ranks2, options):
    found = ranks2.run(memory_on_rank, options)
    assert any(lost for (_, lost, _), _ in found) == NEEDED
    for (messages, _, kept), patched in found:
        assert patched == (messages, 0, kept)


def aliases_on_rank():
    """What _p2p_ops sends: (same memory, the same tensor, carries a graph) for the output and for a gradient."""
    found, isend = [], dist.isend

    def watched_isend(tensor, dst, group):
        found.append(tensor)
        return isend(tensor, dst=dst, group=group)

    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(pp=2)), applied():
        from megatron.core import parallel_state

        group, rank = parallel_state.get_pipeline_model_parallel_group(), dist.get_rank()
        tensor, received = torch.full((4,), float(rank), requires_grad=True) * 1, torch.empty(4)
        names = ("next", "prev") if rank == 0 else ("prev", "next")
        with mock.patch.object(dist, "isend", watched_isend):
            for out, back in (names, names[::-1]):
                given = dict.fromkeys(f"tensor_{way}_{side}" for way in ("send", "recv") for side in names)
                given |= {f"tensor_send_{out}": tensor, f"tensor_recv_{out}": received}
                works = p2p_communication._p2p_ops(
                    **given, group=group, prev_pipeline_rank=1 - rank, next_pipeline_rank=1 - rank
                )
                assert set(works) == {f"send_{out}", f"recv_{out}"}
                for work in works.values():
                    work.wait()
                assert received.tolist() == [1 - rank] * 4
        same = [each.data_ptr() == tensor.data_ptr() for each in found]
        return names, same, [each is tensor for each in found], [each.requires_grad for each in found]


@needed
def test_an_output_is_sent_as_an_alias_and_a_gradient_as_it_is(ranks2):
    for names, same, itself, graph in ranks2.run(aliases_on_rank):
        assert same == [True, True]
        assert itself == graph == [name == "prev" for name in names]


def steps_on_rank(lora, options):
    """Losses of two steps with late messages: without freed outputs on stock, and with them and the patch."""
    found = []
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(pp=2, vp=2)):
        for ids, freed in (([], {}), ([ID] if NEEDED else [], FREED)):
            with shim.patched(only=ids, require=ids), late_messages():
                model = chunks(**FLUSH, **freed, **options)
                if lora:
                    for chunk in model:
                        testing.add_lora(chunk)
                found.append([trained(model), trained(model)])
    return found


def trained(model):
    """A step, for which frozen weights have a gradient of zero."""
    for weight in (weight for chunk in model for weight in chunk.parameters() if not weight.requires_grad):
        weight.grad = torch.zeros_like(weight)
    return step(model)


@pytest.mark.parametrize("lora, options", [(False, {}), (False, FULL), (True, {})], ids=["plain", "recompute", "lora"])
def test_freed_outputs_train_as_those_that_are_kept(ranks2, lora, options):
    for expected, found in ranks2.run(steps_on_rank, lora, options):
        assert found == expected
