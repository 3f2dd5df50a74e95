"""z-loss-padding: the gradient of routers is that of one rank wherever the padding is, and no message is added."""

import contextlib
from unittest import mock

import pytest
import torch
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core import _z_loss_calls
from shim.patches.megatron_core._proof_router_losses import (
    PER_TOKEN,
    model_of,
    of_routers,
    off_by,
    step,
)
from shim.patches.megatron_core.z_loss_padding.proof import OPTIONS, PADDING
from shim.testing import Layout

CELLS = {"0.16.1": "all"}

ID = "z-loss-padding"
pytestmark = needed(ID)
CP, TP = Layout(cp=2), Layout(tp=2, sequence_parallel=True)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OF_SEQUENCES = {**OPTIONS, "moe_router_load_balancing_type": "seq_aux_loss"}
TWO = {**OPTIONS, "moe_router_load_balancing_type": ["global_aux_loss", "aux_loss"], "moe_aux_loss_coeff": [1e-3] * 2}


def trained(layout, options, padding, active, rows=1):
    """The gradients of routers after a step, and how many sums over ranks it took.

    rows: of a microbatch.
    """
    how = shim.patched(only=[ID], require=[ID]) if active else contextlib.nullcontext()
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), how:
        wrapped = model_of(options)
        reduce = torch.distributed.all_reduce
        with mock.patch.object(torch.distributed, "all_reduce", wraps=reduce) as sums:
            step(wrapped, padding, rows)
        return of_routers(wrapped), sums.call_count


CASES = {
    "cp2, recompute": (CP, {**OPTIONS, **FULL}, PADDING),
    "tp2, a rank of padding alone": (TP, OPTIONS, [5, 0]),
    "cp2, two losses": (CP, TWO, PADDING),
    "tp2, two sequences": (TP, OF_SEQUENCES, PADDING, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_rank(ranks2, case):
    """And a step sends what it sends on stock."""
    layout, options, padding, *rows = CASES[case]
    truth, _ = trained(Layout(), options, padding, False, *rows)
    found = ranks2.run(trained, layout, options, padding, True, *rows)
    stock = ranks2.run(trained, layout, options, padding, False, *rows)
    for (gradient, sums), (others, expected) in zip(found, stock, strict=True):
        assert off_by(gradient, truth) < 1e-5 < 1e-2 < off_by(others, truth)
        assert sums == expected


@pytest.mark.parametrize(
    ("options", "padding"),
    [
        (OPTIONS, []),
        ({**OPTIONS, **PER_TOKEN}, PADDING),
        ({**OPTIONS, "moe_router_load_balancing_type": "none"}, PADDING),
        ({**OPTIONS, "moe_router_load_balancing_type": "global_aux_loss"}, PADDING),
    ],
    ids=["no mask", "per token", "no auxiliary loss", "another group"],
)
def test_what_it_cannot_or_need_not_change_is_as_on_stock(ranks2, options, padding):
    found = ranks2.run(trained, CP, options, padding, True)
    stock = ranks2.run(trained, CP, options, padding, False)
    for (gradient, _), (expected, _) in zip(found, stock, strict=True):
        assert torch.equal(gradient, expected)


def test_on_one_rank_nothing_changes():
    found, stock = (trained(Layout(), OPTIONS, PADDING, active)[0] for active in (True, False))
    assert torch.equal(found, stock)


def after_a_failure():
    """The gradients of a step behind one that failed between the z-loss and the count."""
    from megatron.core.transformer.moe import router

    with testing.megatron_on_cpu(), testing.layout_initialised(CP), shim.patched(only=[ID], require=[ID]):
        wrapped = model_of(OPTIONS)
        with mock.patch.object(router, "get_tokens_per_expert_and_token_count", side_effect=ZeroDivisionError):
            with pytest.raises(ZeroDivisionError):
                step(wrapped, PADDING)
        step(wrapped)
        without_mask, left = of_routers(wrapped), _z_loss_calls._NOW.call
        step(wrapped, PADDING)
        return without_mask, left, of_routers(wrapped)


def test_an_exception_inside_does_not_reach_the_next_step(ranks2):
    truths = [trained(Layout(), OPTIONS, padding, False)[0] for padding in ([], PADDING)]
    for without_mask, left, with_mask in ranks2.run(after_a_failure):
        assert left is None
        assert off_by(without_mask, truths[0]) < 1e-5
        assert off_by(with_mask, truths[1]) < 1e-5
