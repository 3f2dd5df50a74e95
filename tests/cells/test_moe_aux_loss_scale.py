"""moe-aux-loss-scale: losses of routers have the gradient of one rank on many layouts; what is logged stays."""

import contextlib
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe import moe_utils

import shim
from shim import testing
from shim.patches.megatron_core._proof_features import takes_padding_mask
from shim.patches.megatron_core._proof_router_losses import (
    AUX,
    PER_TOKEN,
    ROWS,
    TOKENS,
    model_of,
    of_routers,
    off_by,
    step,
)
from shim.patches.megatron_core.moe_aux_loss_scale.proof import BOTH
from shim.testing import Layout

CELLS = {
    "0.13.1": "all",
    "0.12.3": ["test_a_dispatcher_that_gathers_the_tokens_of_tensor_parallel_ranks_counts_them_itself"],
}

ID = "moe-aux-loss-scale"
NEEDED = shim.plan()[ID].wanted
needed = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")
# 0.13 and 0.14 gather tokens into a buffer that other layers write into, which autograd refuses.
GATHERS = not testing.release().startswith(("0.13.", "0.14."))
CP, EXPERTS = Layout(cp=2), Layout(tp=2, sequence_parallel=True, ep=2 if GATHERS else 1)
PADDING = [3, 1] if takes_padding_mask() else []
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# Tokens are dropped where an expert has more than its share of the rank's tokens, so that layouts drop other tokens.
# Nothing of that reaches the first router's losses.
DROP = {"moe_expert_capacity_factor": 1.0, "num_layers": 1}
# All-to-all over expert-parallel ranks needs a GPU.
GATHER = {"moe_token_dispatcher_type": "allgather"} if GATHERS else {}
SHARED = {"moe_shared_expert_intermediate_size": 16}


def packed():
    """Two sequences, of three and five tokens."""
    offsets = torch.tensor([0, 3, TOKENS], dtype=torch.int32)
    longest = {"max_seqlen_q": TOKENS - 3, "max_seqlen_kv": TOKENS - 3}
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets.clone(), **longest)


def tracker():
    """What is logged, by name."""
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        return moe_utils.get_moe_metrics_tracker().metrics
    module = moe_utils if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker") else parallel_state
    return module.get_moe_layer_wise_logging_tracker()


def logged():
    """The losses that are logged, by name."""
    return {name: entry["values"] if isinstance(entry, dict) else entry.values for name, entry in tracker().items()}


def trained(layout, options, padding, pack, active):
    """The gradients of routers after a step, and the losses that it has logged, of this rank."""
    how = shim.patched(only=[ID], require=[ID]) if active else contextlib.nullcontext()
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), how:
        tracker().clear()
        wrapped = model_of(options)
        step(wrapped, padding, **({"packed_seq_params": packed()} if pack else {}))
        return of_routers(wrapped), logged()


def assert_same(losses, expected):
    assert losses.keys() == expected.keys() != set()
    assert all(torch.equal(losses[name], expected[name]) for name in expected)


CASES = {
    # Without calculate_per_token_loss the z-loss is a mean of means, which padding makes another.
    "cp2": (CP, AUX if PADDING else BOTH, PADDING, False),
    "cp2, per token, drop, recompute": (CP, {**BOTH, **PER_TOKEN, **DROP, **FULL}, PADDING, False),
    "ep2 x tp2": (EXPERTS, {**BOTH, **PER_TOKEN, **GATHER, **SHARED}, PADDING, True),
}


@needed
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_rank(case, request):
    """And what is logged is that of stock."""
    layout, *how = CASES[case]
    truth, _ = trained(Layout(), *how, active=True)
    ranks = request.getfixturevalue(f"ranks{layout.world}")
    found = ranks.run(trained, layout, *how, True)
    assert all(off_by(gradient, truth) < 1e-5 for gradient, _ in found)
    if "drop" in case:
        for (_, losses), (_, expected) in zip(found, ranks.run(trained, layout, *how, False), strict=True):
            assert_same(losses, expected)


@needed
def test_on_one_rank_nothing_happens():
    """No bit changes, and nobody sets a scale that stock does not set."""
    how = ({**BOTH, **PER_TOKEN}, PADDING, False)
    scaler = schedules.MoEAuxLossAutoScaler
    with mock.patch.object(scaler, "set_loss_scale", wraps=scaler.set_loss_scale) as sets:
        found, losses = trained(Layout(), *how, active=True)
        assert sets.call_count == ROWS
    stock, expected = trained(Layout(), *how, active=False)
    assert torch.equal(found, stock)
    assert_same(losses, expected)


@pytest.mark.skipif(not testing.release().startswith("0.12."), reason="only 0.12 has the dispatcher alltoall_seq")
def test_a_dispatcher_that_gathers_the_tokens_of_tensor_parallel_ranks_counts_them_itself(ranks2):
    how = ({**AUX, **PER_TOKEN, "moe_token_dispatcher_type": "alltoall_seq"}, [], False, True)
    truth, _ = trained(Layout(), *how)
    for gradient, _ in ranks2.run(trained, Layout(tp=2, sequence_parallel=True), *how):
        assert off_by(gradient, truth) < 1e-5
