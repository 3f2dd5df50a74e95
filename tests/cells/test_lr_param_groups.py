"""lr-param-groups: every group finds its own part of a checkpoint, and where none can be told, loading says so."""

import copy
import io

import pytest
import torch
from megatron.core.optimizer import optimizer as upstream

import shim
from shim.patches.megatron_core._proof_param_groups import EMBEDDING_LR, LR, fields, inner_of, optimizer_of

CELLS = {"0.17.0": "all"}

ID = "lr-param-groups"
NEEDED = shim.plan()[ID].wanted
needed = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")
both = pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
pytestmark = pytest.mark.usefixtures("one_rank")


def applied():
    return shim.patched(only=[ID], require=[ID])


def written(state):
    """The state as it comes from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def moments(optimizer):
    """Of every parameter, in the order of the groups, what the optimizer keeps of it."""
    inner = inner_of(optimizer)
    return [inner.state[weight] for group in inner.param_groups for weight in group["params"]]


def rates(optimizer):
    return [(group["max_lr"], group["min_lr"]) for group in optimizer.param_groups]


@needed
@both
def test_what_stock_does_right_stays(distributed):
    """Without a learning rate of their own the groups have different keys, and a changed rate is no obstacle."""
    trained = optimizer_of(distributed, decoupled_lr=None, decoupled_min_lr=None)

    def resumed():
        optimizer = optimizer_of(distributed, decoupled_lr=None, decoupled_min_lr=None, lr=LR * 2)
        optimizer.load_state_dict(written(trained.state_dict()))
        return optimizer

    with applied():
        found = resumed()
    expected = resumed()
    assert fields(found) == fields(expected) == fields(trained)
    assert equal(found.state_dict(), expected.state_dict())


@needed
def test_upstreams_function_gets_groups_that_do_not_collide_as_they_are():
    keys = upstream.param_group_identifier_keys
    current = [dict.fromkeys(keys, value) | {"params": [value], "max_lr": 1.0} for value in (0, 1)]
    saved = [group | {"max_lr": 2.0} for group in reversed(current)]
    with applied():
        found = upstream.MegatronOptimizer._filter_and_reorder_param_groups(current, saved)
    assert [id(group) for group in found] == [id(group) for group in reversed(saved)]


@needed
@both
def test_a_checkpoint_is_the_one_of_stock(distributed):
    """What is written has the same content, so either side can load the file of the other."""
    stock = written(optimizer_of(distributed).state_dict())
    with applied():
        assert equal(written(optimizer_of(distributed).state_dict()), stock)


@both
@pytest.mark.parametrize("reordered", [False, True])
def test_states_and_steps_come_along(distributed, reordered):
    """Also where the checkpoint has the groups in another order, which only the distributed optimizer allows."""
    if reordered and not (distributed and NEEDED):
        pytest.skip("the parameters are numbered by the order of the groups")
    trained = optimizer_of(distributed)
    state = written(trained.state_dict())
    if reordered:
        state["optimizer"]["param_groups"].reverse()
    with shim.patched(only=[ID]):
        resumed = optimizer_of(distributed)
        resumed.load_state_dict(state)
    assert fields(resumed) == fields(trained)
    assert equal(moments(resumed), moments(trained))


@needed
@both
def test_one_learning_rate_may_change(distributed):
    """The group that is left over goes with the one that is left over. As on stock, the checkpoint's rate is loaded."""
    trained = optimizer_of(distributed)
    with applied():
        resumed = optimizer_of(distributed, lr=LR * 2, min_lr=LR / 5)
        assert rates(resumed) != rates(trained)
        resumed.load_state_dict(written(trained.state_dict()))
    assert fields(resumed) == fields(trained)


@needed
@both
def test_where_partners_cannot_be_told_it_raises_and_leaves_the_optimizer(distributed):
    changed = {"lr": LR * 2, "min_lr": LR / 5, "decoupled_lr": EMBEDDING_LR * 3, "decoupled_min_lr": EMBEDDING_LR / 7}
    state = written(optimizer_of(distributed).state_dict())
    with applied():
        resumed = optimizer_of(distributed, **changed)
        before = copy.deepcopy(fields(resumed))
        with pytest.raises(shim.ShimError, match=r"lr-param-groups.*In the optimizer: .*In the checkpoint: "):
            resumed.load_state_dict(state)
    assert fields(resumed) == before


@needed
def test_no_hook_stays_also_after_an_exception():
    trained = optimizer_of(True)
    state = trained.state_dict()
    hooks = inner_of(trained)._optimizer_load_state_dict_pre_hooks
    with applied():
        trained.load_state_dict(written(state))
        assert not hooks
        broken = written(state)
        del broken["optimizer"]["param_groups"][0]["step"]
        with pytest.raises(KeyError, match="step"):
            trained.load_state_dict(broken)
    assert not hooks


@needed
def test_groups_that_are_the_same_in_all_keep_their_order():
    keys = upstream.param_group_identifier_keys
    current = [dict.fromkeys(keys, 1.0) | {"params": [number], "max_lr": 1.0} for number in range(3)]
    saved = [group | {"step": number} for number, group in enumerate(current)]
    with applied():
        found = upstream.MegatronOptimizer._filter_and_reorder_param_groups(
            current_groups=current, state_dict_groups=saved
        )
    assert found == saved


@needed
def test_a_group_that_the_checkpoint_lacks_raises_the_error_of_stock():
    keys = upstream.param_group_identifier_keys
    saved = [dict.fromkeys(keys, 1.0) | {"params": [number], "max_lr": float(number)} for number in range(2)]
    current = [saved[0], dict.fromkeys(keys, 2.0) | {"params": [1]}]
    with applied(), pytest.raises(ValueError, match="Could not find parameter group with key"):
        upstream.MegatronOptimizer._filter_and_reorder_param_groups(current, saved)
