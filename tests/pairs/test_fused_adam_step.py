"""fused-adam-step: which steps are saved and loaded, on one rank and on two, and what is left alone."""

import copy
import logging
import tempfile

import pytest

import shim
from shim import testing
from shim.patches.megatron_core.fused_adam_step.proof import (
    STEPS,
    Training,
    apart,
    damaged,
    fused_adam,
    save,
    updates,
)

CELLS = {"0.12.3+2.1.0": "all"}

ID = "fused-adam-step"
SAVES = shim.plan()[ID].variant == "v0_12"
saves = pytest.mark.skipif(not SAVES, reason="this release saves one step for all groups")


@pytest.fixture
def training():
    """Ten steps of it, on one rank, where no group is empty."""
    with testing.layout_initialised(testing.Layout()), fused_adam():
        yield Training().train(10)


def groups_of(training):
    return training.optimizer.state_dict()["optimizer"]["param_groups"]


def inner(training):
    return training.optimizer.chained_optimizers[0].optimizer


@saves
def test_a_full_group_is_saved_as_it_is(training):
    expected = training.counts()
    with shim.patched(only=[ID], require=[ID]):
        assert training.counts() == expected == [10, 10]


@saves
@pytest.mark.parametrize("before", [{}, {"step": 4}, {"step": None}])
def test_an_empty_group_is_saved_with_the_step_of_the_others(training, before):
    """It may have none, or that of the last resume. The optimizer keeps what it has."""
    group = inner(training).param_groups[0]
    for weight in group["params"]:
        del inner(training).state[weight]
    group["params"] = []
    del group["step"]
    group.update(before)
    with shim.patched(only=[ID], require=[ID]):
        assert training.counts() == [10, 10]
    assert {key: group[key] for key in before} == before
    assert ("step" in group) == bool(before)


@saves
def test_groups_that_count_apart_are_left_alone(training):
    """An empty group has no answer then."""
    first, second = inner(training).param_groups
    first["step"] = 3
    extra = {**second, "params": [], "step": 1}
    inner(training).param_groups.append(extra)
    with shim.patched(only=[ID], require=[ID]):
        assert [group["step"] for group in groups_of(training)] == [3, 10, 1]


def on_two_ranks(directory):
    """Counts that a rank saves, whether it has an empty group, the error of the next step, and what the file had."""
    with fused_adam(), shim.patched(only=[ID, "checkpoint-write-format"], require=[ID]):
        saved = Training().train(STEPS)
        right = save(directory)
        resumed = Training().resumed(directory)
        return saved.empty_groups(), saved.counts(), resumed.counts(), apart(updates(resumed), right), resumed.counts()


@saves
def test_two_ranks_save_and_resume():
    """The norm is on rank 1 alone, and data-parallel rank 0 writes."""
    with tempfile.TemporaryDirectory() as directory, testing.Ranks(2) as ranks:
        found = ranks.run(in_layout, on_two_ranks, directory)
    assert [empty for empty, *_ in found] == [1, 0]
    for _, saved, loaded, error, after in found:
        assert saved == loaded == [STEPS] * 2
        assert after == [STEPS + 1] * 2
        assert error == 0


def in_layout(function, *args):
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(ep=2)):
        return function(*args)


def test_a_damaged_checkpoint_is_told_and_goes_on_with_the_step_of_the_others(training, caplog):
    state = damaged(training)
    kept = copy.deepcopy(state["optimizer"]["param_groups"])
    with shim.patched(only=[ID], require=[ID]), caplog.at_level(logging.WARNING, "shim"):
        training.optimizer.load_state_dict(state)
        assert training.counts() == [10, 10]
    (record,) = [record for record in caplog.records if ID in record.getMessage()]
    assert "1 parameter groups of this checkpoint have no step" in record.getMessage()
    assert state["optimizer"]["param_groups"] == kept  # the caller's stays


def test_a_checkpoint_with_two_steps_is_told_and_not_made_worse(training, caplog):
    """Which of them is right is not in the file: stock's result stays."""
    state = training.optimizer.state_dict()
    state["optimizer"]["param_groups"][0]["step"] = 3
    with shim.patched(only=[ID], require=[ID]), caplog.at_level(logging.WARNING, "shim"):
        training.optimizer.load_state_dict(state)
    assert sorted(group["step"] for group in inner(training).param_groups) == [3, 10]
    (record,) = [record for record in caplog.records if ID in record.getMessage()]
    assert "the steps [3, 10]" in record.getMessage()


def test_a_right_checkpoint_goes_through_in_silence(training, caplog):
    state = training.optimizer.state_dict()
    with shim.patched(only=[ID], require=[ID]), caplog.at_level(logging.WARNING, "shim"):
        training.optimizer.load_state_dict(state)
    assert [group["step"] for group in inner(training).param_groups] == [10, 10]
    assert not [record for record in caplog.records if ID in record.getMessage()]


def test_a_first_load_has_no_step_to_give(training):
    """As megatron-core loads a fresh optimizer's state into itself before the checkpoint."""
    with shim.patched(only=[ID], require=[ID]):
        fresh = Training()
        fresh.optimizer.load_state_dict(fresh.optimizer.state_dict())
        assert [group.get("step") for group in inner(fresh).param_groups] == [None, None]
        fresh.train(1)
    assert [group["step"] for group in inner(fresh).param_groups] == [1, 1]
