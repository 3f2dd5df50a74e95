"""optimizer-sharding-default: without a name it is as with the name, and a name that is given stays."""

import contextlib

import pytest
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core._proof_optimizer_resume import (
    STEPS,
    Training,
    apart,
    fused_adam,
    save_after,
    weights_after,
    weights_resumed,
)
from shim.patches.megatron_core.reshardable_padding.proof import FULLY
from shim.testing.user_model import ModelError

CELLS = {"0.16.0": "all"}

ID = "optimizer-sharding-default"
pytestmark = needed(ID)
BY_DATA = {"distrib_optim_sharding_type": "dp_reshardable"}
AVOID = {"chained_optim_avoid_prefix": True}
TWO = testing.Layout(ep=2)
EXPERTS = {"num_moe_experts": 2, "expert_model_parallel_size": 2, "bf16": True, "bucket": None}


@pytest.fixture(autouse=True)
def one_rank(request):
    """One rank, unless the test forks its own; and the optimizer that a GPU has."""
    forks = "metadata" in request.fixturenames
    with contextlib.nullcontext() if forks else testing.layout_initialised(testing.Layout()), fused_adam():
        yield


def applied(**options):
    return shim.patched(only=[ID], require=[ID], options={ID: options} if options else None)


def resumed(directory, metadata, **settings):
    return Training(metadata, **{"seed": 8, **settings}).load(str(directory)).train().weights()


def written(directory, metadata, **settings):
    """The weights after as many steps again, without a break."""
    return Training(metadata, **settings).train().save(str(directory)).train().weights()


@pytest.mark.parametrize(
    "options, named", [({}, BY_DATA), ({"sharding": "fully_reshardable"}, FULLY)], ids=["default", "option"]
)
def test_a_checkpoint_of_either_side_is_loaded_by_the_other(tmp_path, options, named):
    """Without a name the patch writes and reads what stock does with it."""
    settings = {"bf16": True, "bucket": None}
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    truth = written(theirs, named, **settings)
    with applied(**options):
        assert apart(written(ours, None, **settings), truth) == 0
        assert apart(resumed(theirs, None, **settings), truth) == 0
    assert apart(resumed(ours, named, **settings), truth) == 0


def in_layout(layout, function, *args):
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        return function(*args)


@pytest.mark.parametrize("metadata", [None, AVOID], ids=["no metadata", "without prefixes"])
def test_a_chain_of_optimizers_resumes(tmp_path, metadata):
    """Experts have an optimizer of their own, and its keys are others, as if the sharding were named."""
    with applied(), testing.Ranks(2) as ranks:
        ranks.run(in_layout, TWO, save_after, STEPS, str(tmp_path), metadata, EXPERTS)
        truth = ranks.run(in_layout, TWO, weights_after, 2 * STEPS, metadata, EXPERTS)
        found = ranks.run(in_layout, TWO, weights_resumed, STEPS, str(tmp_path), metadata, EXPERTS)
    named = BY_DATA | (metadata or {})
    with testing.Ranks(2) as ranks:
        by_stock = ranks.run(in_layout, TWO, weights_resumed, STEPS, str(tmp_path), named, EXPERTS)
    assert all(apart(*each) == 0 for each in (*zip(found, truth, strict=True), *zip(by_stock, truth, strict=True)))


@pytest.mark.parametrize("named", [FULLY, BY_DATA], ids=["fully_reshardable", "dp_reshardable"])
def test_what_stock_does_right_stays(named):
    """A sharding that is named is taken."""
    training = Training(named, bf16=True).train(1)
    with applied():
        found = training.sharded_state_dict()["optimizer"]
    assert found["param_state_sharding_type"] == named["distrib_optim_sharding_type"]


def test_a_sharding_that_cannot_be_saved_is_refused_as_on_stock(tmp_path):
    named = {"distrib_optim_sharding_type": "fully_sharded_model_space"}
    with applied(), pytest.raises(ModelError, match="flattened_range is not supported"):
        Training(named).train(1).save(str(tmp_path))
    training = Training(None).train(1)
    model = training.model.sharded_state_dict()
    with applied(), pytest.raises(Exception, match="flattened_range is not supported"):
        training.optimizer.sharded_state_dict(model, sharding_type="fully_sharded_model_space")


def test_the_callers_metadata_is_not_changed_and_reaches_upstream():
    """Passed by position or by name, to a chain and to one optimizer."""
    training = Training(None, bf16=True).train(1)
    model = training.model.sharded_state_dict()
    given = {"distrib_optim_fully_reshardable_mem_efficient": True}
    with applied():
        inner = training.optimizer.chained_optimizers[0]
        for found in (
            training.optimizer.sharded_state_dict(model, False, metadata=given),
            inner.sharded_state_dict(model, False, None, given),
            inner.sharded_state_dict(model),
        ):
            assert found["param_state_sharding_type"] == "dp_reshardable"
    assert given == {"distrib_optim_fully_reshardable_mem_efficient": True}


def test_other_buckets_are_refused_aloud(tmp_path):
    """What dp_reshardable cannot do raises, and trains no other weights."""
    with applied():
        Training(None, bf16=True).train(STEPS).save(str(tmp_path))
        with pytest.raises(ModelError):
            Training(None, bf16=True, bucket=None).load(str(tmp_path))
