"""sigmoid-aux-loss-precision: scores in fp32 with the experts that stock counts, and nothing else changes."""

import contextlib

import pytest
import torch
from needed import needed

import shim
from shim.patches.megatron_core.sigmoid_aux_loss_precision.proof import (
    counted_by,
    error,
    gradient,
    logits_of,
    router_of,
)

CELLS = {"0.12.3": "all"}

ID = "sigmoid-aux-loss-precision"


def patched(active=True):
    return shim.patched(only=[ID], require=[ID]) if active else contextlib.nullcontext()


pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]


@pytest.mark.parametrize("spread", [1.0, 4.0, 12.0])
def test_the_gradient_is_that_of_fp64_but_for_its_rounding(spread):
    stock = error(spread)
    with patched():
        found = error(spread)
    assert found < 3e-3 < stock


def test_experts_that_get_tokens_and_those_that_the_loss_counts_stay():
    router, logits = router_of(), logits_of(4.0, torch.bfloat16)
    with torch.no_grad():
        right = [*router.routing(logits[:, None])[:2], counted_by(router, logits)]
        with patched():
            found = [*router.routing(logits[:, None])[:2], counted_by(router, logits)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, right, strict=True))


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({"moe_router_score_function": "softmax"}, torch.bfloat16), ({}, torch.float32)],
    ids=["softmax", "fp32"],
)
def test_other_routers_are_as_on_stock(options, dtype):
    router = router_of(**options)
    right = gradient(router, logits_of(4.0, dtype))
    with patched():
        assert torch.equal(gradient(router, logits_of(4.0, dtype)), right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_padding_is_left_out_as_on_stock(dtype):
    from megatron.core.transformer.moe import moe_utils

    compute = getattr(moe_utils, "compute_routing_scores_for_aux_loss", None)
    if compute is None or "padding_mask" not in compute.__code__.co_varnames:
        pytest.skip("this release takes no padding mask")
    logits, padding = logits_of(4.0, dtype), torch.arange(256) > 200
    right_map, _ = compute(logits, 4, "sigmoid", padding_mask=padding)
    with patched():
        counted, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, 4, "sigmoid", padding_mask=padding)
    assert torch.equal(counted, right_map) and scores.dtype == torch.float32
    assert not scores[padding].any()
