"""offloaded-fp32-weights: other optimizers are left alone, and loaded weights and states are trained on."""

import pytest
import torch

import shim
from shim.patches.megatron_core.cpu_offloaded_optimizer.proof import (
    after_a_checkpoint,
    after_files_were_loaded,
    after_weights_were_loaded,
)
from shim.patches.megatron_core.offloaded_fp32_weights.proof import trained

CELLS = {"0.19.2": "all"}

ID = "offloaded-fp32-weights"
pytestmark = pytest.mark.usefixtures("one_rank")  # of tests/cells/conftest.py


@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_what_stock_does_right_stays(mixed):
    """Without optimizer_cpu_offload the same bits."""
    stock = trained(False, mixed)
    with shim.patched(only=[ID], require=[ID]):
        found = trained(False, mixed)
    assert all(torch.equal(one, other) for one, other in zip(found, stock, strict=True))


@pytest.mark.parametrize("after", [after_weights_were_loaded, after_files_were_loaded, after_a_checkpoint])
@pytest.mark.parametrize("aware", [False, True], ids=["main params", "precision aware"])
def test_what_is_loaded_is_trained_on(after, aware):
    """Of a model in bf16 whose norms are in fp32, beside the patch for what is loaded."""
    with shim.patched(only=[ID, "cpu-offloaded-optimizer"], require=[ID, "cpu-offloaded-optimizer"]):
        assert after(aware=aware, fraction=0.5, norms=torch.float32, lora=False) == 0
