"""Proofs of trackers-of-several-models."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim import testing
from shim.testing.proof import Here, proof

EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
}
OUT_OF_BOUNDS = r"^IndexError: index \d is out of bounds for dimension 0 with size \d"


def logged(kind: str) -> Tensor:
    """The values of the tracker of a kind of loss, one for each layer; none if there is no tracker."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    if kind == "mtp":
        tracker = MTPLossLoggingHelper.tracker
        found = next((tracker[name] for name in ("values", "loss_values", "loss_sums") if name in tracker), None)
    elif hasattr(moe_utils, "get_moe_metrics_tracker"):
        entry = moe_utils.get_moe_metrics_tracker().metrics.get("load_balancing_loss")
        found = None if entry is None else entry.values
    else:
        state: Any = moe_utils if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker") else parallel_state
        found = state.get_moe_layer_wise_logging_tracker().get("load_balancing_loss", {}).get("values")
    return torch.zeros(0) if found is None else found.clone()


def forget() -> None:
    """Makes the trackers those of a new process."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        moe_utils.get_moe_metrics_tracker().metrics.clear()
    else:
        state: Any = moe_utils if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker") else parallel_state
        state.get_moe_layer_wise_logging_tracker().clear()


def step(**options: Any) -> None:
    from megatron.core.transformer.moe import moe_utils

    model: Any = testing.build_gpt(**options)
    row = torch.arange(8)[None]
    with contextlib.ExitStack() as stack:
        # 0.16 looks it up in every step, and has it with Transformer Engine only. A part of a router is compiled on
        # first use, for many seconds.
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        model(row, row, None, labels=row).mean().backward()


def lost(kind: str, *models: dict[str, Any]) -> float:
    """How far the log of several models is from the sum of the logs of each alone."""
    alone = []
    for options in models:
        forget()
        step(**options)
        alone.append(logged(kind))
    forget()
    for options in models:
        step(**options)
    found = logged(kind)
    forget()
    longest = max(map(len, alone))
    truth = torch.stack([torch.nn.functional.pad(each, (0, longest - len(each))) for each in alone]).sum(0)
    assert found.shape == truth.shape and truth.all()
    return float((found - truth).abs().max())


def places_lost() -> int:
    """Of a stage without experts, which makes its tensor for a report, from 0.18 on."""
    try:
        from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
    except ImportError:
        return 0
    tracker = MoEMetricsTracker()
    for layers in (1, 3):
        tracker.ensure_initialized("load_balancing_loss", layers, device="cpu")
    return 3 - len(tracker.metrics["load_balancing_loss"].values)


def of_experts() -> float:
    models = ({**EXPERTS, "num_layers": layers, "mtp_num_layers": None} for layers in (1, 3, 2))
    return lost("moe", *models) + places_lost()


@proof("log off by {:.1e}", bound=1e-6, defect="crash", crashes=OUT_OF_BOUNDS)
def a_deeper_mixture_of_experts_runs_behind_another(here: Here) -> float:
    """A mixture of experts with more layers than the first one of the process raises in its forward pass.

    To reproduce: build GPTModels of one and of three layers with `num_moe_experts=4` and `moe_aux_loss_coeff=0.1`, and
    run forward on the first and then on the second.

    The first one makes the tensor of the log, with a place for each of its layers. Right is the sum of the logs of each
    model alone. From 0.12 to 0.19.
    """
    return float(here.run(of_experts)[0])


def of_mtp() -> float:
    return lost("mtp", *({"num_layers": 1, "mtp_num_layers": depths} for depths in (1, 3, 2)))


@proof("log off by {:.1e}", bound=1e-6, defect="crash", crashes=OUT_OF_BOUNDS)
def more_depths_of_mtp_run_behind_another_model(here: Here) -> float:
    """A model that predicts more tokens than the first one of the process raises in its forward pass.

    To reproduce: build GPTModels with `mtp_num_layers=1` and with 3, and run forward with labels on the first and then
    on the second.

    `MTPLossLoggingHelper.tracker` has a place for each depth of the first one. From 0.12 to 0.19.
    """
    return float(here.run(of_mtp)[0])
