"""mtp-router-losses: routers of a repeated layer have the gradient of one, in a recompute too; others are stock's."""

import pytest
import torch
from needed import needed

import shim
from shim.patches.megatron_core.mtp_router_losses.proof import AUX, Z, error, gpt, hybrid, of_router

CELLS = {"0.19.2": "all"}

ID, TRACKERS = "mtp-router-losses", "trackers-of-several-models"
pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]  # of tests/cells/conftest.py
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PER_TOKEN = {"calculate_per_token_loss": True}


def applied():
    """Beside the patch for the logs of models of different depth, which these tests build."""
    return shim.patched(only=[ID, TRACKERS], require=[ID])


@pytest.mark.parametrize("build", [gpt, hybrid])
@pytest.mark.parametrize("options", [AUX, Z, {**AUX, **Z, **AUX}, {**Z, **PER_TOKEN}, {**Z, **FULL}])
def test_a_repeated_layer_has_the_router_losses_of_one(build, options):
    with applied():
        assert error(build, **options) < 1e-5


def logged():
    """The places of the log of the routers' losses, by name."""
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        metrics = moe_utils.get_moe_metrics_tracker().metrics
        found = {name: entry.values.tolist() for name, entry in metrics.items()}
        metrics.clear()
        return found
    tracker = moe_utils.get_moe_layer_wise_logging_tracker()
    found = {name: entry["values"].tolist() for name, entry in tracker.items()}
    tracker.clear()
    return found


def steps(build, repeated, options):
    """The gradient of MTP's router after a step, and the log."""
    logged()
    return of_router(build, repeated, options), logged()


def test_losses_of_hybrid_layers_have_a_place_behind_those_of_the_decoder():
    """Also if the stack of a depth has more layers than there are depths."""
    for pattern, repeated, filled in (("EE/*E", False, 3), ("EE/*E/*E", False, 4), ("EE/-*E/-*E", True, 3)):
        with applied():
            _, log = steps(lambda pattern=pattern, **options: hybrid(pattern, **options), repeated, {**AUX, **Z, **AUX})
        for values in log.values():
            assert sum(value > 0 for value in values) == filled and all(values[:filled])
        assert set(log) == {"load_balancing_loss", "z_loss"}


@pytest.mark.parametrize("options", [AUX, Z])
def test_what_stock_does_right_stays(options):
    """Depths with layers of their own in a GPT model, and the log of a repeated one."""
    for repeated in (False, True):
        found = []
        for active in (applied(), shim.patched(only=[TRACKERS])):
            with active:
                found.append(steps(gpt, repeated, options))
        (gradient, log), (expected, log_of_stock) = found
        assert log == log_of_stock
        assert (repeated and "moe_z_loss_coeff" in options) != torch.equal(gradient, expected)
