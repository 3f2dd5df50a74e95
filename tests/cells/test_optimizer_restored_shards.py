"""optimizer-restored-shards: what stock moves right stays so, and releases without the methods need no patch."""

import pytest
import torch
from needed import needed

import shim
from shim.patches.megatron_core._proof_aware_adam import aware_adam
from shim.patches.megatron_core.optimizer_restored_shards.proof import trained

CELLS = {"0.19.2": "all"}

ID = "optimizer-restored-shards"
pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]  # of tests/cells/conftest.py


@pytest.mark.parametrize("half", [True, False], ids=["bf16", "fp32"])
def test_an_optimizer_with_copies_of_weights_trains_on(half):
    """Its copies move, and come back; shards in fp32 stay."""
    right = trained(aware=False, half=half)
    with shim.patched(only=[ID], require=[ID]):
        found = trained(aware=False, half=half, sleep=True)
    assert all(torch.equal(found[name], right[name]) for name in right)


def test_without_a_sleep_nothing_changes():
    with aware_adam():
        right = trained()
        with shim.patched(only=[ID], require=[ID]):
            found = trained()
    assert all(torch.equal(found[name], right[name]) for name in right)
