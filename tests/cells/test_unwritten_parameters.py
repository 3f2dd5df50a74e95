"""unwritten-parameters: sinks and biases of routers are written if the config asks for it, and nothing else changes."""

import pytest
import torch
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core.unwritten_parameters.proof import EXPERTS, MODEL, unwritten

CELLS = {"0.15.3": "all"}

ID = "unwritten-parameters"
pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]  # of tests/cells/conftest.py


def test_a_model_without_them_has_stocks_bits(monkeypatch):
    monkeypatch.setattr("shim.testing.model._seed_weights", lambda *args: None)

    def build():
        torch.manual_seed(0)
        return testing.build_gpt(**MODEL).state_dict()

    stock = build()
    with shim.patched(only=[ID], require=[ID]):
        found = build()
    assert all(torch.equal(found[name], stock[name]) for name in stock if isinstance(stock[name], torch.Tensor))


@pytest.mark.parametrize("options", [{"softmax_type": "learnable"}, EXPERTS], ids=["sinks", "bias"])
def test_without_initialisation_they_stay(options):
    with shim.patched(only=[ID], require=[ID]):
        assert unwritten(perform_initialization=False, **options) >= 4
        assert unwritten(**options) == 0
