"""cpu-offloaded-optimizer: every way to load, both devices, other layouts, and files that stock has written."""

import contextlib
import tempfile
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from thorough import times

import shim
from shim import testing
from shim.patches.megatron_core._proof_offloading import offloading
from shim.patches.megatron_core.cpu_offloaded_optimizer.proof import (
    SAVED_AT,
    SAVED_BY_BUCKETS,
    STEPS,
    Training,
    after_a_checkpoint,
    after_files_were_loaded,
    after_weights_were_loaded,
    differing,
)
from shim.testing import Layout
from shim.testing.user_model import ModelError

CELLS = {"0.16.0": "all"}

ID = "cpu-offloaded-optimizer"
VARIANT = shim.plan()[ID].variant
BUCKETS = {"form": "dp_reshardable"}
TORCHS_ADAM = {"aware": False, "offload": False}
FORMS = (  # of this release, but fully_sharded_bucket_space, see the header of the patch
    "dp_zero_gather_scatter",
    *(["fully_sharded_model_space"] if VARIANT in ("v0_12", "v0_15") else []),
    *(["dp_reshardable", "fully_reshardable"] if VARIANT in SAVED_BY_BUCKETS else []),
)

on_one_rank = pytest.mark.usefixtures("one_rank")
main_or_model = pytest.mark.parametrize("aware", [False, True], ids=["main params", "precision aware"])
partly = pytest.mark.parametrize("fraction", times([0.5], [0.5, 1.0]))
with_buckets = pytest.mark.skipif(VARIANT not in SAVED_BY_BUCKETS, reason="the format came with 0.15")
written_by_stock = pytest.mark.skipif(VARIANT in ("v0_12", "v0_15"), reason="stock cannot write it")


def applied():
    return shim.patched(only=[ID], require=[ID])


def written():
    """The same; 0.12 can write no checkpoint on this torch without checkpoint-write-format."""
    return shim.patched(only=[ID, "checkpoint-write-format"], require=[ID])


def copies(training):
    """Of every weight, what the optimizer steps on."""
    hybrid = training.distributed.optimizer
    return [(param, hybrid.param_to_inner_param[param]) for group in hybrid.param_groups for param in group["params"]]


def states(training):
    inner = training.distributed.optimizer
    return [inner.state[param] for group in inner.param_groups for param in group["params"]]


@on_one_rank
@main_or_model
@partly
def test_weights_are_loaded_whatever_part_is_on_the_cpu(aware, fraction):
    with applied():
        assert after_weights_were_loaded(aware=aware, fraction=fraction) == 0


@on_one_rank
@main_or_model
@partly
def test_files_are_loaded_whatever_part_is_on_the_cpu(aware, fraction):
    with applied():
        assert after_files_were_loaded(aware=aware, fraction=fraction) == 0


@on_one_rank
@main_or_model
@pytest.mark.parametrize("form", ["dp_reshardable", "dp_zero_gather_scatter"])
@with_buckets
def test_checkpoints_are_loaded(aware, form):
    with applied():
        assert after_a_checkpoint(form, aware=aware) == 0
        assert after_a_checkpoint(form, aware=aware, fraction=0.5) == 0


@on_one_rank
@pytest.mark.skipif(VARIANT == "v0_12", reason="the format came with 0.15")
def test_torchs_adam_loads_what_is_fully_reshardable():
    """On stock KeyError: 'step'."""
    with pytest.raises(ModelError, match="KeyError: 'step'"):
        after_a_checkpoint("fully_reshardable", aware=False, offload=False)
    with applied():
        assert after_a_checkpoint("fully_reshardable", aware=False, offload=False) == 0


@on_one_rank
@pytest.mark.skipif(VARIANT == "v0_12", reason="0.12 is wrong there")
def test_what_stock_does_right_stays():
    """With the precision-aware optimizer weights are loaded right from 0.13 on."""
    assert after_weights_were_loaded(aware=True) == 0
    with applied():
        assert after_weights_were_loaded(aware=True) == 0


def test_an_optimizer_without_a_step_gets_upstreams_own_call():
    """As FusedAdam without offloading: the tensors of the file are copied into those that are there."""
    weight, moment = torch.zeros(3), torch.zeros(3)
    inner = SimpleNamespace(param_groups=[{"params": [weight]}], state={weight: {"exp_avg": moment}})
    distributed = SimpleNamespace(
        optimizer=inner,
        model_param_group_index_map={"model": (0, 0)},
        config=SimpleNamespace(
            use_precision_aware_optimizer=False, use_precision_aware_optimizer_no_fp8_or_ds_fp8=False
        ),
        ddp_config=SimpleNamespace(use_custom_fsdp=False),
    )
    with applied():
        loaded = {"param": torch.ones(3), "exp_avg": torch.full((3,), 2.0)}
        DistributedOptimizer._set_main_param_and_optimizer_states(distributed, "model", loaded)
    assert inner.state == {weight: {"exp_avg": moment}}
    assert weight.tolist() == [1.0] * 3 and moment.tolist() == [2.0] * 3


@on_one_rank
@main_or_model
def test_after_a_load_the_copies_have_the_values_and_the_states_are_where_they_were(aware):
    with applied(), offloading(), tempfile.TemporaryDirectory() as directory:
        trained = Training(aware=aware, fraction=0.5).train(0, SAVED_AT)
        trained.save_files(directory)
        resumed = Training(aware=aware, fraction=0.5, seed=9).load_files(directory)
        for (_, old), (param, copy), state in zip(copies(trained), copies(resumed), states(resumed), strict=True):
            assert torch.equal(copy, old) and torch.equal(param, copy.to(param.dtype))
            assert state["master_param"] is copy
            assert copy.is_cuda or not (state["exp_avg"].is_cuda or state["exp_avg_sq"].is_cuda)
        assert len({id(state["step"]) for state in states(resumed)}) == len(states(resumed))


@on_one_rank
@pytest.mark.parametrize("fails", [False, True])
def test_the_first_load_gives_learning_rates_back(fails):
    with applied(), offloading():
        hybrid = Training().distributed.optimizer
        before = [(group["lr"], group["weight_decay"]) for group in hybrid.param_groups]
        weights = [param.clone() for param in hybrid.param_to_inner_param]
        if fails:
            hybrid.cpu_optimizers[0].register_step_pre_hook(broken)
        with pytest.raises(RuntimeError, match="broken") if fails else contextlib.nullcontext():
            hybrid.dummy_step()
        for optimizer in (hybrid, *hybrid.sub_optimizers):
            assert {(group["lr"], group["weight_decay"]) for group in optimizer.param_groups} == set(before)
        assert all(map(torch.equal, weights, hybrid.param_to_inner_param))


def broken(*args):
    raise RuntimeError("broken")


def content(state):
    """Everything that is written of a state, with its place in the whole tensor. Padding has no value."""
    if isinstance(state, ShardedTensor):
        return state.key, state.global_shape, state.global_offset, state.replica_id, state.data.tolist()
    if isinstance(state, dict):
        padding = getattr(state.get("padding"), "obj", False)
        return {} if padding else {key: content(value) for key, value in state.items()}
    if isinstance(state, list):
        return [content(value) for value in state]
    return None if isinstance(state, LocalNonpersistentObject) else repr(state)


@on_one_rank
@main_or_model
def test_a_checkpoint_is_the_one_of_stock(aware):
    """So each side loads the files of the other."""
    with offloading(), tempfile.TemporaryDirectory() as directory:
        trained = Training(aware=aware).train(0, SAVED_AT)
        sides = []
        for side in (contextlib.nullcontext, applied):
            with side():
                trained.save_files(directory)
                found = [torch.load(f"{directory}/{name}", weights_only=False) for name in ("common", "states")]
                forms = ("dp_reshardable",) if VARIANT in ("v0_16", "v0_20") else ()
                for trained.form in (*forms, "dp_zero_gather_scatter"):
                    found.append(content(trained.sharded_state_dict()["optimizer"]))
            sides.append(repr(found))
        assert sides[0] == sides[1]


@on_one_rank
@main_or_model
@written_by_stock
def test_what_stock_has_written_is_loaded(aware):
    with offloading(), tempfile.TemporaryDirectory() as directory:
        whole = Training(aware=aware, **BUCKETS).train(0, SAVED_AT)
        whole.save(directory)
        whole.train(SAVED_AT, STEPS)
        with applied():
            resumed = Training(aware=aware, seed=9, **BUCKETS).load(directory).train(SAVED_AT, STEPS)
        assert differing(resumed.weights(), whole.weights()) == 0


@on_one_rank
@written_by_stock
def test_stock_loads_what_was_written_with_the_patch():
    """As it loads its own: all but the step."""
    with offloading(), tempfile.TemporaryDirectory() as directory:
        with applied():
            trained = Training(**BUCKETS).train(0, SAVED_AT)
            trained.save(directory)
        resumed = Training(seed=9, **BUCKETS).load(directory)
        for state, old in zip(states(resumed), states(trained), strict=True):
            assert all(torch.equal(state[name], old[name]) for name in ("exp_avg", "exp_avg_sq", "master_param"))
        assert {float(state["step"]) for state in states(resumed)} == {1.0}


@on_one_rank
def test_a_wrong_step_in_a_file_stays_and_may_be_set_before_the_load():
    """A resume on stock leaves it, and nothing in the file tells it."""
    with applied(), offloading(), tempfile.TemporaryDirectory() as directory:
        whole = Training().train(0, SAVED_AT)
        whole.save_files(directory)
        model, optimizer = torch.load(f"{directory}/common", weights_only=False)
        for number in (1, SAVED_AT):
            for group in optimizer["optimizer"]["param_groups"]:
                group["step"] = number
            torch.save([model, optimizer], f"{directory}/common")
            resumed = Training(seed=9).load_files(directory)
            assert {float(state["step"]) for state in states(resumed)} == {number}
        whole.train(SAVED_AT, STEPS)
        assert differing(resumed.train(SAVED_AT, STEPS).weights(), whole.weights()) == 0


def on_rank(layout, directory, first, last):
    """Weights of this rank after these steps. They begin with a load, if not at 0, and may end in a save."""
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), applied(), offloading():
        # The adapters of LoRA are saved as if tensor-parallel ranks had the same.
        settings = {**BUCKETS, "lora": layout.tp == 1}
        training = Training(seed=9, **settings).load(directory) if first else Training(**settings)
        training.train(first, last)
        if last == SAVED_AT:
            training.save(directory)
        return {name: weight.float() for name, weight in training.weights().items()}


@with_buckets
@pytest.mark.parametrize("tp", times([2], [2, 1]))
def test_a_resume_on_two_ranks(ranks2, tmp_path, tp):
    """Data-parallel replicas, which share the states, or tensor parallelism."""
    layout = Layout(tp=tp)
    whole = ranks2.run(on_rank, layout, str(tmp_path), 0, STEPS)
    ranks2.run(on_rank, layout, str(tmp_path), 0, SAVED_AT)
    for found, truth in zip(ranks2.run(on_rank, layout, str(tmp_path), SAVED_AT, STEPS), whole, strict=True):
        assert differing(found, truth) == 0


@with_buckets
@pytest.mark.parametrize("saved_on_two", times([True], [True, False]))
def test_a_resume_with_another_number_of_replicas(ranks2, tmp_path, saved_on_two):
    """The replicas have the same rows, so that the truth is the same."""

    def run(two, *steps):
        if two:
            return ranks2.run(on_rank, Layout(), str(tmp_path), *steps)
        return [on_rank(Layout(), str(tmp_path), *steps)]

    (truth,) = run(False, 0, STEPS)
    run(saved_on_two, 0, SAVED_AT)
    for found in run(not saved_on_two, SAVED_AT, STEPS):
        assert differing(found, truth) == 0


def first_load_on_rank(form, directory, tiny):
    """Weights that differ after a resume of torch's Adam, which has not stepped."""
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout()), written(), only_a_norm(tiny):
        return after_a_checkpoint(form, directory, fresh=True, **TORCHS_ADAM)


@contextlib.contextmanager
def only_a_norm(tiny):
    """With `tiny` a single norm is trained. Its buffer has 32 weights and padding, so the second rank has none."""
    if not tiny:
        yield
        return
    with mock.patch.object(testing, "add_lora", lambda model, seed: model.requires_grad_(False)):
        yield


@pytest.mark.parametrize("form", FORMS)
def test_torchs_adam_is_loaded_before_its_first_step(ranks2, tmp_path, form):
    assert ranks2.run(first_load_on_rank, form, str(tmp_path), False) == [0, 0]


@pytest.mark.parametrize("form", [form for form in FORMS if form != "dp_reshardable"][: times(1, 9)])
def test_a_rank_without_weights_saves_and_loads_torchs_adam(ranks2, tmp_path, form):
    """dp_reshardable raises "empty bucket encountered" there, with any optimizer."""
    assert ranks2.run(first_load_on_rank, form, str(tmp_path), True) == [0, 0]


def save_a_norm(directory):
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout()), offloading(te=False), only_a_norm(True):
        Training(form="dp_zero_gather_scatter", **TORCHS_ADAM).train(0, SAVED_AT).save(directory)


@pytest.mark.skipif(VARIANT == "v0_12", reason="0.12 cannot write without checkpoint-write-format")
def test_stock_cannot_save_if_a_rank_has_no_weights(ranks2, tmp_path):
    with pytest.raises(testing.RankError, match="saving, AssertionError"):
        ranks2.run(save_a_norm, str(tmp_path))


@on_one_rank
def test_the_step_is_the_one_of_the_checkpoint():
    with written(), offloading(te=False), tempfile.TemporaryDirectory() as directory:
        settings = {**TORCHS_ADAM, "form": "dp_zero_gather_scatter"}
        Training(**settings).train(0, SAVED_AT).save(directory)
        resumed = Training(**settings, seed=9).load(directory)
        assert {float(state["step"]) for state in states(resumed)} == {SAVED_AT}
        assert len({id(state["step"]) for state in states(resumed)}) == len(states(resumed))
        assert all(map(torch.is_tensor, resumed.distributed.optimizer.state))


@on_one_rank
def test_saving_torchs_adam_before_its_first_step_stays_an_error(tmp_path):
    """A file without moments could not be loaded."""
    for side in (contextlib.nullcontext, applied):
        with side(), offloading(te=False):
            training = Training(form="dp_zero_gather_scatter", **TORCHS_ADAM)
            with pytest.raises(AssertionError):
                training.sharded_state_dict()
            assert not training.distributed.optimizer.state


@on_one_rank
def test_no_step_of_zero_is_left_if_the_load_fails(monkeypatch):
    with applied(), offloading(te=False):
        training = Training(form="dp_zero_gather_scatter", **TORCHS_ADAM)
        training.loading = True
        monkeypatch.setattr(DistributedOptimizer, "load_state_dict", broken)
        with pytest.raises(RuntimeError, match="broken"):
            training.sharded_state_dict()
        assert not training.distributed.optimizer.state


@on_one_rank
def test_an_optimizer_that_counts_in_its_groups_is_asked_for_once(monkeypatch):
    """With Transformer Engine or Apex upstream's own call does it all."""
    with applied(), offloading(te=True):
        training = Training(form="dp_zero_gather_scatter", **TORCHS_ADAM)
        training.loading = True
        with mock.patch.object(DistributedOptimizer, "load_state_dict") as load:
            training.sharded_state_dict()
        assert load.call_count == 1
