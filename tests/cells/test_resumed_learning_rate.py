"""resumed-learning-rate: a resume has the rates that it asks for, of every group, optimizer and scheduler."""

import copy
import gc
import weakref

import pytest
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

import shim
from shim.patches.megatron_core._proof_optimizer_resume import Training, fused_adam
from shim.patches.megatron_core._proof_param_groups import EMBEDDING_LR, LR, fields, inner_of, optimizer_of
from shim.patches.megatron_core.resumed_learning_rate.proof import SAVED, WANTED, resumed, scheduler_of

CELLS = {"0.19.2": "all"}

ID = "resumed-learning-rate"
# What a checkpoint of several rates needs on 0.16 to 0.18.
BOTH = [ID, *(["lr-param-groups"] if shim.plan()["lr-param-groups"].wanted else [])]
OVERRIDE = {"override_opt_param_scheduler": True}
CHECKPOINT = {"use_checkpoint_opt_param_scheduler": True}
pytestmark = pytest.mark.usefixtures("one_rank")
both = pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])


def applied():
    return shim.patched(only=BOTH, require=[ID])


def rates(optimizer):
    return [(group["max_lr"], group["min_lr"]) for group in optimizer.param_groups]


def own_keys(optimizer):
    return set.union(*(set(group) for group in optimizer.param_groups))


def several(distributed, lr, embeddings, **settings):
    return optimizer_of(
        distributed, lr=lr, min_lr=lr / 10, decoupled_lr=embeddings, decoupled_min_lr=embeddings / 10, **settings
    )


@both
def test_the_rate_of_the_run(distributed):
    with applied():
        groups = resumed(distributed, **OVERRIDE).param_groups
    assert {group["lr"] for group in groups} == {group["max_lr"] for group in groups} == {WANTED}
    assert {group["min_lr"] for group in groups} == {WANTED / 10}
    assert [group["weight_decay"] for group in groups] == [0.01 * group["wd_mult"] for group in groups]


@both
def test_the_rate_of_the_checkpoint(distributed):
    """Also from 0.19 on, where stock raises."""
    with applied():
        groups = resumed(distributed, **CHECKPOINT).param_groups
    assert {group["lr"] for group in groups} == {group["max_lr"] for group in groups} == {SAVED}
    assert [group["weight_decay"] for group in groups] == [0.1 * group["wd_mult"] for group in groups]


@both
def test_a_run_that_asks_for_neither_is_refused(distributed):
    """With a remedy, and before the optimizer has changed."""
    trained = optimizer_of(distributed)
    with applied():
        optimizer = several(distributed, LR, EMBEDDING_LR * 3)
        states = inner_of(optimizer).state_dict()["state"].keys()
        scheduler = scheduler_of(optimizer, LR)
        before = copy.deepcopy(fields(optimizer))
        with pytest.raises(shim.ShimError, match=r"resumed-learning-rate.*Set override_opt_param_scheduler"):
            optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
        assert scheduler.max_lr == LR
    assert fields(optimizer) == before and inner_of(optimizer).state_dict()["state"].keys() == states


@both
@pytest.mark.parametrize("settings", [OVERRIDE, CHECKPOINT, {}], ids=["override", "checkpoint", "neither"])
def test_a_run_that_changes_nothing_resumes_as_on_stock(distributed, settings):
    trained = optimizer_of(distributed, decoupled_lr=None, decoupled_min_lr=None)
    before = scheduler_of(trained, LR)
    before.step(5)

    def again():
        optimizer = optimizer_of(distributed, decoupled_lr=None, decoupled_min_lr=None)
        scheduler = scheduler_of(optimizer, LR, **settings)
        optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
        scheduler.load_state_dict(before.state_dict())
        return optimizer

    stock = again()
    with applied():
        found = again()
    assert fields(found) == fields(stock) == fields(trained)


@both
def test_one_of_several_rates_changes(distributed):
    """The others find their own, and the two that are left over are partners."""
    trained = optimizer_of(distributed)
    before = scheduler_of(trained, LR)
    for settings, expected in ((OVERRIDE, LR * 2), (CHECKPOINT, LR)):
        with applied():
            optimizer = several(distributed, LR * 2, EMBEDDING_LR)
            scheduler = scheduler_of(optimizer, LR * 2, **settings)
            optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
            scheduler.load_state_dict(before.state_dict())
        assert {rate for rate, _ in rates(optimizer)} == {expected, EMBEDDING_LR}
        assert [group["lr"] for group in optimizer.param_groups] == [rate for rate, _ in rates(optimizer)]


@both
@pytest.mark.parametrize("marked", [True, False], ids=["", "unmarked"])
def test_all_of_several_rates_change(distributed, marked):
    """The run's own hold whichever partners they have; those of a checkpoint need to know theirs."""
    trained = optimizer_of(distributed)
    state = copy.deepcopy(trained.state_dict())
    if not marked:  # as of a release whose groups do not say which has the settings of all
        for group in state.get("optimizer", state)["param_groups"]:
            group.pop("default_config", None)
    with applied():
        optimizer = several(distributed, LR * 2, EMBEDDING_LR * 3)
        own = rates(optimizer)
        scheduler = scheduler_of(optimizer, LR * 2, **OVERRIDE)
        optimizer.load_state_dict(copy.deepcopy(state))
        assert rates(optimizer) == own and scheduler.max_lr == LR * 2
        scheduler = scheduler_of(optimizer, LR * 2, **CHECKPOINT)
        kinds = [(group["wd_mult"], group["is_decoupled_lr"]) for group in trained.param_groups]
        known = len(set(kinds)) == len(kinds) or (marked and "default_config" in own_keys(optimizer))
        if known:
            optimizer.load_state_dict(copy.deepcopy(state))
            assert rates(optimizer) == rates(trained)
        else:
            with pytest.raises(shim.ShimError, match="partners are unknown"):
                optimizer.load_state_dict(copy.deepcopy(state))
            assert rates(optimizer) == own and scheduler.max_lr == LR * 2


@both
def test_a_trainer_that_loads_the_optimizer_alone(distributed):
    """As verl does, whose scheduler begins anew: the next step has its rate and its weight decay."""
    trained = optimizer_of(distributed, decoupled_lr=None, decoupled_min_lr=None)
    scheduler_of(trained, LR, start_wd=0.1, end_wd=0.1).step(50)
    with applied():
        optimizer = optimizer_of(distributed, lr=WANTED, min_lr=0.0, decoupled_lr=None, decoupled_min_lr=None)
        scheduler = scheduler_of(optimizer, WANTED, lr_decay_style="linear", **OVERRIDE)
        optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
    groups = optimizer.param_groups
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(WANTED, 0.01 * g["wd_mult"]) for g in groups]
    assert scheduler.num_steps == 0


def test_an_optimizer_without_a_scheduler_is_stocks():
    trained = optimizer_of(True, decoupled_lr=None, decoupled_min_lr=None)

    def again():
        optimizer = optimizer_of(True, decoupled_lr=None, decoupled_min_lr=None)
        optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
        return fields(optimizer)

    stock = again()
    with applied():
        assert again() == stock


def test_no_optimizer_keeps_its_scheduler():
    with applied():
        optimizer = optimizer_of(True)
        gone = weakref.ref(scheduler_of(optimizer, LR))
    gc.collect()
    assert gone() is None
    with applied():
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_a_checkpoint_has_what_stocks_has():
    trained = optimizer_of(True)
    stock = scheduler_of(trained, LR)
    groups = copy.deepcopy(fields(trained))
    with applied():
        other = optimizer_of(True)
        assert scheduler_of(other, LR).state_dict() == stock.state_dict() and fields(other) == groups


def file_resumed(directory, form, **asked):
    """The rates of a run's groups, and those that it had before it loaded a file. The file has SAVED in each group."""
    settings = {"bf16": True, "bucket": None, "saved": False, "num_moe_experts": 2}
    with fused_adam():
        trained = Training({"distrib_optim_sharding_type": form}, **settings).train(1)
        for group in trained.optimizer.param_groups:
            group.update(lr=SAVED, max_lr=SAVED, min_lr=SAVED / 10)
        trained.save(str(directory))
        resumed = Training({"distrib_optim_sharding_type": form}, seed=8, **settings)
        own = rates(resumed.optimizer)
        scheduler = scheduler_of(resumed.optimizer, own[0][0], **asked)
        resumed.load(str(directory))
    assert scheduler.max_lr == own[0][0]
    assert all(group["lr"] == group["max_lr"] for group in resumed.optimizer.param_groups)
    return rates(resumed.optimizer), own


def formats():
    """Of the distributed optimizer's states in a file, as far as this release has them and a bf16 model is loaded."""
    known = ("dp_reshardable", "fully_reshardable", "fully_sharded_bucket_space", "fully_sharded_model_space")
    return [form for form in known if hasattr(DistributedOptimizer, f"sharded_param_state_{form}")]


@pytest.mark.parametrize("form", formats())
def test_a_file_of_each_format(tmp_path, form):
    """Of experts, which have an optimizer and groups of their own."""
    with applied():
        found, own = file_resumed(tmp_path, form, **OVERRIDE)
        assert found == own and SAVED not in {rate for rate, _ in found}
        found, _ = file_resumed(tmp_path, form, **CHECKPOINT)
        assert set(found) == {(SAVED, SAVED / 10)}
