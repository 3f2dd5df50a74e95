"""hybrid-rotary-interleaved: a hybrid model is the GPTModel of the same layers, and check() tells of older models."""

import re

import pytest
import torch
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core.hybrid_rotary_interleaved.proof import PAIRS, TOKENS

CELLS = {"0.19.2": "all"}

ID = "hybrid-rotary-interleaved"
pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]  # of tests/cells/conftest.py


def of_gpt(name):
    """Two layers of a hybrid model are one of a GPTModel."""
    name = re.sub(r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) // 2}", name)
    return name.replace("final_norm", "final_layernorm")


def losses(model):
    row = torch.arange(TOKENS)[None]
    return model(row, row, None, labels=row).detach()


@pytest.mark.parametrize("options", [PAIRS, {}], ids=["pairs", "halves"])
def test_it_is_the_model_of_the_same_layers(options):
    gpt = testing.build_gpt(mtp_num_layers=None, **options)
    with shim.patched(only=[ID], require=[ID]):
        hybrid = testing.build_hybrid("*-*-", **options)
    weights = dict(gpt.named_parameters())
    with torch.no_grad():
        for name, weight in hybrid.named_parameters():
            weight.copy_(weights[of_gpt(name)])
    torch.testing.assert_close(losses(hybrid), losses(gpt))


def test_check_tells_of_a_model_that_was_built_before():
    model = testing.build_hybrid("*-", **PAIRS)
    with shim.patched(only=[ID]):
        report = shim.check(model)[ID]
    assert "made for halves" in report.reason
