"""reshardable-padding: checkpoints can be exchanged with stock, and those that stock has damaged are known."""

import contextlib
import logging
from unittest import mock

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from thorough import times

import shim
from shim import testing
from shim.patches.megatron_core._proof_optimizer_resume import STEPS, Training, fused_adam, save_after, weights_resumed
from shim.patches.megatron_core.reshardable_padding import _displaced
from shim.patches.megatron_core.reshardable_padding.proof import FULLY

CELLS = {"0.17.1": "all"}

ID = "reshardable-padding"
NEEDED = shim.plan()[ID].wanted
needed = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")
SPARING = FULLY | {"distrib_optim_fully_reshardable_mem_efficient": True}
KINDS = {
    "fp32": {},
    "bf16": {"bf16": True},
    "mixed": {"bf16": True, "mixed": True},
    "adapters": {"lora": True, "bucket": 200},
    "experts": {"num_moe_experts": 2, "add_bias_linear": False},
}
EVERY_DAY = times(("mixed", "experts"), KINDS)
each_kind = pytest.mark.parametrize("settings", [KINDS[kind] for kind in EVERY_DAY], ids=EVERY_DAY)


@pytest.fixture(autouse=True)
def one_rank(request):
    """One rank, unless the test forks its own; and the optimizer that a GPU has."""
    forks = "saving" in request.fixturenames
    with contextlib.nullcontext() if forks else testing.layout_initialised(testing.Layout()), fused_adam():
        yield


@pytest.fixture
def written(tmp_path):
    """The directory of a checkpoint of a new training, written now."""

    def write(**settings):
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        directory.mkdir()
        return str(directory), Training(FULLY, **settings).train().save(str(directory))

    return write


def applied(**options):
    return shim.patched(only=[ID], require=[ID], options={ID: options} if options else None)


def equal(one, other):
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(one, other, strict=True)
    )


@needed
@each_kind
def test_a_checkpoint_of_either_side_is_loaded_by_the_other(written, caplog, settings):
    """Written with the patch and loaded by stock, and, with one bucket, the other way round. No warning is raised."""
    with applied():
        directory, saved = written(**settings)
    assert equal(Training(FULLY, **{"seed": 8, **settings}).load(directory).states(), saved.states())

    directory, saved = written(**{**settings, "bucket": None})
    with applied(), caplog.at_level(logging.WARNING, "shim"):
        assert equal(Training(FULLY, **{"seed": 8, **settings}).load(directory).states(), saved.states())
    assert ID not in caplog.text


@needed
def test_what_stock_does_right_stays(written):
    """With one bucket upstream's function gets the very optimizer, and each weight has the very part of the state."""
    training = Training(FULLY, bucket=None).train()
    inner = training.optimizer.chained_optimizers[0]
    seen = []

    def watched(self, *args, **kwargs):
        seen.append(self)
        return gather(self, *args, **kwargs)

    gather = DistributedOptimizer.get_parameter_state_dp_zero
    with applied(), mock.patch.object(DistributedOptimizer, "get_parameter_state_dp_zero", watched):
        training.sharded_state_dict()
    assert seen == [inner]


@needed
def test_nothing_is_gathered_or_copied_beyond_stock():
    """The same messages, and every tensor is a part of what was gathered."""
    training = Training(FULLY).train()

    def saved():
        with mock.patch.object(torch.distributed, "all_gather", wraps=torch.distributed.all_gather) as gathered:
            state = training.sharded_state_dict()["optimizer"]["param_state"]
        storages = {part.data.untyped_storage().data_ptr() for tensors in state.values() for part in tensors.values()}
        return gathered.call_count, len(storages)

    stock = saved()
    attributes = dict(vars(training.optimizer.chained_optimizers[0]))
    with applied():
        calls, storages = saved()
    assert calls == stock[0]
    assert storages == 3  # main weights and two moments; stock adds those of weights that it fills up with zeros
    after = vars(training.optimizer.chained_optimizers[0])
    assert attributes.keys() == after.keys() and all(after[name] is attributes[name] for name in after)


@needed
@each_kind
def test_a_damaged_checkpoint_is_known_and_loaded_as_on_stock(written, caplog, settings):
    directory, saved = written(**settings)
    found = Training(FULLY, **{"seed": 8, **settings}).load(directory).states()
    assert not equal(found, saved.states())
    with applied(), caplog.at_level(logging.WARNING, "shim"):
        same = Training(FULLY, **{"seed": 8, **settings}).load(directory).states()
    assert equal(same, found)
    told = [record.getMessage() for record in caplog.records if ID in record.getMessage()]
    assert told and "damaged" in told[0] and "Load the model without its optimizer" in told[0]


@needed
def test_a_damaged_checkpoint_can_be_refused(written):
    directory, _ = written()
    with applied(damaged="raise"):
        training = Training(FULLY, seed=8)
        with pytest.raises(testing.user_model.ModelError, match="DamagedCheckpointError"):
            training.load(directory)


@needed
def test_without_the_weights_of_the_checkpoint_nothing_is_said(written, caplog):
    """An optimizer that is loaded before its model, or without it, cannot be compared with it."""
    with applied():
        directory, _ = written()
        training = Training(FULLY, seed=8)
        with caplog.at_level(logging.WARNING, "shim"), mock.patch.object(training.model, "load_state_dict"):
            training.load(directory)
    assert ID not in caplog.text


def plain(directory):
    """Every tensor of the optimizer, whole."""
    found = dist_checkpointing.load_plain_tensors(directory)
    return {key: value for key, value in found.items() if key.startswith("optimizer.state.")}


@needed
@pytest.mark.parametrize(
    "saving, metadata",
    [(testing.Layout(tp=2), FULLY), (testing.Layout(ep=2), SPARING)],
    ids=["tensor parallel", "gathered on one rank"],
)
def test_it_is_written_right_by_several_ranks(tmp_path, saving, metadata):
    """With several buckets it has what it has with one, and a training on another number of ranks resumes from it."""
    several, one = tmp_path / "several", tmp_path / "one"
    several.mkdir()
    one.mkdir()
    with applied(), testing.Ranks(2) as ranks:
        ranks.run(in_layout, saving, save_after, STEPS, str(several), metadata, {})
        ranks.run(in_layout, saving, save_after, STEPS, str(one), metadata, {"bucket": None})
    with testing.layout_initialised(testing.Layout()):
        found, truth = plain(str(several)), plain(str(one))
        assert found.keys() == truth.keys() and len(truth) > 30
        assert all(torch.equal(found[key], truth[key]) for key in truth)
        resumed = [weights_resumed(STEPS, str(each), FULLY, {}) for each in (several, one)]
        assert all(map(torch.equal, *resumed))


def in_layout(layout, function, *args):
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        return function(*args)


@pytest.mark.once
def test_of_a_sound_checkpoint_only_the_last_weights_are_looked_at():
    def operations(count):
        weights = [torch.nn.Parameter(torch.randn(40)) for _ in range(count)]
        saved = [weight.detach().clone() for weight in weights]
        with testing.Footprint() as footprint:
            assert _displaced(weights, saved) == 0
        return footprint.operations

    assert operations(3) == operations(30)
