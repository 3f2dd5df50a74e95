"""offloaded-fp32-weights: other optimizers are left alone."""

import pytest
import torch

import shim
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
