"""sleep-methods: methods of 0.16 move what they move there, to the same bits, and beside shim.offload."""

import pytest
import sleep_cases
from sleep_cases import Case

import shim

CELLS = {"0.14.0": "all", "0.15.3": "first", "0.16.1": "first"}

ID = "sleep-methods"
NEEDED = shim.plan()[ID].wanted
IDS = [ID, "optimizer-restored-shards"]  # whose fixes the methods of 0.15 and later need
WANTED = [id for id in IDS if shim.plan()[id].wanted]
# What is in no buffer stays: weights of a model with a plain optimizer. In bytes, with tables of positions.
LEFT = {"distributed": 1024, "aware": 1024, "offloaded": 1024, "plain": 34_816}


@pytest.fixture(autouse=True)
def on_cpu():
    """In the place of the fixture that turns CUDA into the CPU."""


def by_methods(training):
    buffers = [*training.model.buffers, *training.model.expert_parallel_buffers]
    training.optimizer.offload_to_cpu()
    training.optimizer.offload_to_cpu()  # a second call moves nothing
    for buffer in buffers:
        buffer.offload_to_cpu()

    def restore():
        for buffer in buffers:
            buffer.reload_from_cpu()
        training.optimizer.restore_from_cpu()

    return sleep_cases.others_handle(restore)


def slept(case, sleep):
    with shim.patched(only=WANTED, require=WANTED):
        return sleep_cases.slept(case, sleep)


@pytest.mark.parametrize("optimizer", LEFT)
def test_two_steps_sleep_and_two_steps_are_four(ranks, optimizer):
    (found,) = ranks[1].run(slept, Case(optimizer), by_methods)
    before, asleep, after = found.bytes
    assert found.differ == []
    assert asleep <= LEFT[optimizer] and after == before


def with_shim_behind(training):
    methods = by_methods(training)
    handle = sleep_cases.offloaded(training)

    def restore():
        handle.restore()
        methods.restore()

    return sleep_cases.others_handle(restore)


def test_shim_takes_what_the_methods_leave(ranks):
    (found,) = ranks[1].run(slept, Case("plain"), with_shim_behind)
    before, asleep, after = found.bytes
    assert found.differ == [] and asleep <= 1024 and after == before


def refused():
    """Of calls on an optimizer that sleeps, by either way: those that are not refused."""
    case, allowed = Case("distributed"), []
    with shim.patched(only=WANTED), sleep_cases.as_on_a_gpu(case) as make:
        training = sleep_cases.Training(case, make)
        training.step(0)
        with sleep_cases.offloaded(training):
            allowed += sleep_cases.not_refused({"offload_to_cpu": training.optimizer.offload_to_cpu})
        if NEEDED and WANTED == [ID]:
            training.optimizer.offload_to_cpu()
            calls = {name: getattr(training.optimizer, name) for name in ("step", "state_dict")}
            allowed += sleep_cases.not_refused(calls)
            training.optimizer.restore_from_cpu()
        training.step(1)
    return allowed


def test_a_sleeping_optimizer_refuses_what_it_cannot_do(ranks):
    assert ranks[1].run(refused) == [[]]


@pytest.mark.skipif(NEEDED, reason="this release needs the patch")
def test_this_release_needs_no_patch():
    assert shim.plan()[ID].action == "upstream"
