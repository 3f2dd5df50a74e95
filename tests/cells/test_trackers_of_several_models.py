"""trackers-of-several-models: the log of a process has a place for each layer of its deepest model."""

import pytest
import torch

import shim
from shim.patches.megatron_core.trackers_of_several_models.proof import (
    EXPERTS,
    forget,
    logged,
    of_experts,
    of_mtp,
    step,
)

CELLS = {"0.19.2": "all"}

ID = "trackers-of-several-models"
pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(autouse=True)
def trackers():
    forget()
    yield
    forget()


def applied():
    return shim.patched(only=[ID], require=[ID])


def test_models_of_different_depth():
    """The log is the sum of theirs, whichever comes first."""
    with applied():
        assert of_experts() < 1e-6
        assert of_mtp() < 1e-6


def test_one_model_has_the_log_of_stock():
    def run():
        forget()
        step(**EXPERTS, num_layers=2, mtp_num_layers=1)
        return [logged("moe"), logged("mtp")]

    stock = run()
    with applied():
        found = run()
    assert all(map(torch.equal, found, stock))


def test_the_indexer_of_dsa():
    """Its log is kept alike."""
    dsa = pytest.importorskip("megatron.core.transformer.experimental_attention_variant.dsa", exc_type=ImportError)
    helper = dsa.DSAIndexerLossLoggingHelper
    helper.tracker.clear()
    with applied():
        for layers in (1, 3, 2):
            helper.save_loss_to_tracker(torch.tensor(1.0), layers, layers)
        assert helper.tracker["values"].tolist() == [1.0, 1.0, 1.0]
    helper.tracker.clear()


def test_a_stage_without_experts_has_a_place_for_each_layer():
    """It makes its tensor for a report, also if a model with fewer layers has made one before."""
    logging = pytest.importorskip("megatron.core.transformer.moe.moe_logging", exc_type=ImportError)
    tracker = logging.MoEMetricsTracker()
    with applied():
        tracker.ensure_initialized("loss", 2, device="cpu")
        tracker.record("loss", torch.tensor(1.0), 2, 2)
        tracker.ensure_initialized("loss", 4, device="cpu")
        assert tracker.metrics["loss"].values.tolist() == [0.0, 1.0, 0.0, 0.0]
