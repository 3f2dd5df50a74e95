"""sleep-methods and optimizer-restored-shards: megatron-core's methods free all, to the same bits."""

import functools

import pytest
import sleep_cases
from sleep_cases import Case
from thorough import in_full

import shim

ABOUT = ["sleep-methods", "optimizer-restored-shards"]
CELLS = {"0.16.1": "all"}

ID = "sleep-methods"
NEEDED = shim.plan()[ID].wanted
WANTED = [id for id in ABOUT if shim.plan()[id].wanted]
TABLES = 1024  # bytes of buffers of modules, of the optimizer's flags, and of no model

CASES = {
    "LoRA": Case("distributed", lora=True, sums_in_half=True),
    "plain": Case("plain", sums_in_half=True),
    "precision-aware": Case("aware"),
    "on the CPU": Case("offloaded"),
    "fp32": Case("plain", half=None),
    "distributed, fp32": Case("distributed", half=None),
}
# On stock the process ends here: the optimizer copies shards of a buffer that has no memory.
BUFFERS_FIRST = {"precision-aware", "distributed, fp32"}
IN_FULL = {"fp32", "distributed, fp32"}


@pytest.fixture(autouse=True)
def on_cpu():
    """In the place of the fixture that turns CUDA into the CPU."""


def slept(case, sleep):
    with shim.patched(only=WANTED, require=WANTED):
        return sleep_cases.slept(case, sleep)


@pytest.mark.parametrize("name", [pytest.param(name, marks=in_full if name in IN_FULL else ()) for name in CASES])
def test_two_steps_sleep_and_two_steps_are_four(ranks, name):
    sleep = functools.partial(sleep_cases.by_methods, buffers_first=name in BUFFERS_FIRST)
    (found,) = ranks[1].run(slept, CASES[name], sleep)
    before, asleep, after = found.bytes
    assert found.differ == []
    assert asleep <= TABLES and after == before


def with_shim_behind(training):
    methods = sleep_cases.by_methods(training)
    handle = sleep_cases.offloaded(training)

    def restore():
        handle.restore()
        methods.restore()

    return sleep_cases.others_handle(restore)


def test_shim_takes_what_the_methods_leave(ranks):
    (found,) = ranks[1].run(slept, Case("plain"), with_shim_behind)
    before, asleep, after = found.bytes
    assert found.differ == [] and asleep <= TABLES and after == before


def frozen_moved_by_others(training):
    """As a trainer does that looks at the device of frozen weights, and moves them when the buffers are gone."""
    frozen = [weight for weight in training.model.parameters() if not weight.requires_grad]
    methods = sleep_cases.by_methods(training)
    for weight in frozen:
        if weight.device.type != "cpu":
            weight.data = weight.data.cpu()

    def restore():
        for weight in frozen:
            if weight.device.type == "cpu":
                weight.data = weight.data.cuda()
        methods.restore()

    return sleep_cases.others_handle(restore)


def test_a_trainer_may_move_frozen_weights_itself(ranks):
    (found,) = ranks[1].run(slept, CASES["LoRA"], frozen_moved_by_others)
    before, asleep, after = found.bytes
    assert found.differ == [] and asleep <= TABLES and after == before


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
