"""fused-norm-recompute: a step is that without recompute, and outputs that are no inputs are thrown away as ever."""

import pytest
import torch
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core._proof_recompute import NORMS, checkpoints_without_te
from shim.patches.megatron_core.fused_norm_recompute.proof import TOKENS, WIDTH, Norm
from shim.testing.cpu import storage_shared_in_python

CELLS = {"0.19.2": "all"}

ID = "fused-norm-recompute"
pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]  # of tests/cells/conftest.py

EXPERTS = {"num_moe_experts": 2, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}


def gradients(recompute):
    model = testing.build_gpt(mtp_num_layers=None, **EXPERTS, **(NORMS if recompute else {}))
    for layer in model.decoder.layers:
        layer.pre_mlp_layernorm.__class__ = Norm
        assert layer.recompute_pre_mlp_layernorm == recompute
    row = torch.arange(12)[None]
    with checkpoints_without_te(), storage_shared_in_python():
        model(row, row, None, labels=row.roll(-1, 1)).mean().backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def test_a_step_is_that_without_recompute():
    with shim.patched(only=[ID], require=[ID]):
        found = gradients(recompute=True)
    right = gradients(recompute=False)
    assert all(torch.equal(found[name], right[name]) for name in right)


def test_the_norm_itself_is_thrown_away():
    hidden = torch.randn(TOKENS, 1, WIDTH, requires_grad=True) * 1.0
    with shim.patched(only=[ID], require=[ID]), checkpoints_without_te() as random:
        checkpoint = random.CheckpointWithoutOutput()
        normed, residual = checkpoint.checkpoint(Norm(WIDTH), hidden)
        checkpoint.discard_output_and_register_recompute(normed.sin())
    assert normed.untyped_storage().nbytes() == 0
    assert torch.equal(residual, hidden)
