"""dp-reshardable-fp32: weights in fp32 are loaded, those in bf16 as on stock, and gradients are recorded again."""

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core._proof_optimizer_resume import BY_DATA, STEPS, Training, apart, fused_adam
from shim.patches.megatron_core.dp_reshardable_fp32.proof import resumed_from_a_file
from shim.testing.user_model import ModelError

CELLS = {"0.17.0": "all"}

ID = "dp-reshardable-fp32"
pytestmark = needed(ID)
reshardable = pytest.mark.skipif(
    not hasattr(DistributedOptimizer, "load_parameter_state_from_dp_reshardable"), reason="it has no dp_reshardable"
)


@pytest.fixture(autouse=True)
def one_rank():
    with testing.layout_initialised(testing.Layout()), fused_adam():
        yield


def applied():
    return shim.patched(only=[ID], require=[ID])


def resumed(directory, **settings):
    return Training(BY_DATA, **{"seed": 8, **settings}).load(str(directory)).train(STEPS).weights()


@reshardable
@pytest.mark.parametrize("settings", [{}, {"bf16": True, "mixed": True}], ids=["fp32", "norms in fp32"])
def test_weights_in_fp32_resume(tmp_path, settings):
    """Stock writes the checkpoint, and raises when it loads it."""
    truth = Training(BY_DATA, **settings).train().save(str(tmp_path)).train().weights()
    with pytest.raises(ModelError, match="in-place operation"):
        resumed(tmp_path, **settings)
    with applied():
        assert apart(resumed(tmp_path, **settings), truth) == 0
        assert torch.is_grad_enabled()


@reshardable
def test_what_stock_does_right_stays(tmp_path):
    """Weights in bf16, written by either side and loaded by the other."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    with applied():
        truth = Training(BY_DATA, bf16=True).train().save(str(ours)).train().weights()
    assert apart(resumed(ours, bf16=True), truth) == 0
    Training(BY_DATA, bf16=True).train().save(str(theirs))
    with applied():
        assert apart(resumed(theirs, bf16=True), truth) == 0


def test_a_file_of_all_ranks_in_bf16_is_loaded_as_on_stock():
    assert resumed_from_a_file(bf16=True) == 0
    with applied():
        assert resumed_from_a_file(bf16=True) == 0


@reshardable
def test_gradients_are_recorded_after_an_exception():
    training = Training(BY_DATA)
    with applied():
        with pytest.raises(KeyError):
            training.optimizer.chained_optimizers[0]._set_main_param_and_optimizer_states(None, {})
        assert torch.is_grad_enabled()
