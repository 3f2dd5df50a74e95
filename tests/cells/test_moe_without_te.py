"""moe-without-te: the name is there, and where upstream has it, it is upstream's."""

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

import shim
from shim import testing
from shim.patches.megatron_core.moe_without_te.proof import EXPERTS

CELLS = {"0.14.0": "all"}

ID = "moe-without-te"
NEEDED = shim.plan()[ID].wanted
needed = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")
pytestmark = pytest.mark.usefixtures("one_rank")


@needed
def test_a_name_that_is_there_stays(monkeypatch):
    """As where Transformer Engine is installed."""
    gemm = print
    monkeypatch.setattr(moe_utils, "te_general_gemm", gemm, raising=False)
    with shim.patched(only=[ID], require=[ID]):
        assert moe_utils.te_general_gemm is gemm
    assert moe_utils.te_general_gemm is gemm


@needed
def test_the_name_goes_with_the_patch(monkeypatch):
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    with shim.patched(only=[ID], require=[ID]):
        assert moe_utils.te_general_gemm is None
    assert not hasattr(moe_utils, "te_general_gemm")


@pytest.mark.parametrize("recompute", [{}, {"recompute_granularity": "full", "recompute_method": "uniform"}])
def test_experts_train(recompute, monkeypatch):
    """The same step by the router's product in float64, which no release computes by Transformer Engine."""
    if NEEDED:
        monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    settings = {**recompute, "recompute_num_layers": 1} if recompute else {}
    ids = torch.arange(16)[None]

    def gradients(**router):
        model = testing.build_gpt(mtp_num_layers=None, **EXPERTS, **settings, **router)
        model(ids, ids, None, labels=ids).mean().backward()
        return {name: weight.grad for name, weight in model.named_parameters()}

    with shim.patched(only=[ID], require=[ID]) if NEEDED else shim.patched(only=[]):
        found, truth = gradients(), gradients(moe_router_dtype="fp64")
    assert found.keys() == truth.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, truth[name], rtol=1e-4, atol=1e-6)
