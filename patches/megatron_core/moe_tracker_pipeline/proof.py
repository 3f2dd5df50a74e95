"""Proof of moe-tracker-pipeline."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from shim import testing
from shim.testing.proof import Here, LacksFeatureError, proof
from shim.testing.schedules import mean_of_row, run_microbatches

NAME = "load_balancing_loss"
MODEL: dict[str, Any] = {"num_layers": 2, "mtp_num_layers": 1, "share_embeddings_and_output_weights": False}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
}
LENGTH, STEPS, MICROBATCHES = 8, 2, 2
LAYERS_WITH_EXPERTS = 2  # one of the decoder, and one of MTP


def stage() -> Any:
    """Of a model with a dense layer, a layer with experts, and an MTP layer with experts: what this stage has."""
    from megatron.core import parallel_state

    dense = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    return testing.build_gpt(**MODEL, **({} if dense else EXPERTS))


def step(model: Any) -> None:
    """Two microbatches through the schedule of the release."""
    from megatron.core.transformer.moe import moe_utils

    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 64, (1, LENGTH), generator=generator) for _ in range(MICROBATCHES)]
    # 0.16 looks it up in every step, and has it with Transformer Engine only.
    with mock.patch.object(moe_utils, "te_general_gemm", None, create=True):
        run_microbatches(model, rows, mean_of_row, LENGTH)


def tracker() -> dict[str, Any]:
    """What the routers of this stage have saved, by the name of the loss."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    # 0.12 has it in another module.
    owner: Any = moe_utils if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker") else parallel_state
    found: dict[str, Any] = owner.get_moe_layer_wise_logging_tracker()
    return found


@contextlib.contextmanager
def lengths_compared() -> Iterator[None]:
    """Raise where the ranks of a group sum tensors of different length. NCCL does not, and waits."""
    sums = dist.all_reduce

    def compared(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        lengths: list[Any] = [None] * dist.get_world_size(kwargs.get("group"))
        dist.all_gather_object(lengths, tensor.numel(), group=kwargs.get("group"))
        if len(set(lengths)) > 1:
            raise TimeoutError(f"the ranks of a group sum tensors of different length: {min(lengths)}, {max(lengths)}")
        return sums(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", compared):
        yield


def logged() -> list[tuple[float, float]]:
    """The loss that this stage logs for each step, and what its routers have saved: the mean over the layers."""
    from megatron.core.transformer.moe.moe_utils import track_moe_metrics

    model, found = stage(), []
    if "mtp_num_layers" not in inspect.signature(track_moe_metrics).parameters:
        raise LacksFeatureError("the tracker of this release has no places for MTP layers")
    for _ in range(STEPS):
        step(model)
        saved = float(tracker()[NAME]["values"].sum()) / LAYERS_WITH_EXPERTS / MICROBATCHES if has_saved() else 0.0
        total: dict[str, Tensor] = {}
        with lengths_compared():
            track_moe_metrics(
                loss_scale=1 / MICROBATCHES,
                iteration=1,
                writer=mock.Mock(),
                total_loss_dict=total,
                force_initialize=True,
                track_names=[NAME],
                num_layers=MODEL["num_layers"],
                moe_layer_freq=[0, 1],
                mtp_num_layers=MODEL["mtp_num_layers"],
            )
        found.append((float(total[NAME]), saved))
    return found


def has_saved() -> bool:
    """Whether this stage has experts."""
    return NAME in tracker() and bool(tracker()[NAME]["values"].any())


@proof(
    "logged loss off by {:.1e}",
    bound=1e-6,
    ranks=2,
    defect="hang",
    crashes=r"^TimeoutError: the ranks of a group sum tensors of different length: 2, 3",
)
def losses_of_experts_are_logged_beside_a_dense_stage(here: Here) -> float:
    """Logging hangs if a pipeline stage has no experts and the model has multi-token prediction.

    To reproduce: run a model of two layers on two pipeline stages, with `moe_layer_freq=[0, 1]`, `num_moe_experts=4`,
    `moe_router_load_balancing_type="aux_loss"`, `moe_aux_loss_coeff=0.1` and `mtp_num_layers=1`. After a step call
    `track_moe_metrics` on both stages as the training loop does: with `force_initialize=True`,
    `track_names=["load_balancing_loss"]`, `num_layers=2` and `mtp_num_layers=1`.

    The routers of the second stage have saved their losses in a tensor of three places, two for the layers and one for
    MTP. The first stage has no router. It makes a tensor of two places, and both stages call `all_reduce` over the
    pipeline. NCCL waits for ever; gloo raises. The proof compares the lengths before each call.

    Right is what the routers have saved: each stage logs its sum over the layers with experts, divided by their number.

    From 0.13 to 0.16. Megatron-LM pull request 3401 fixes it in 0.17.
    """
    stages = here.run(logged, layout=testing.Layout(pp=here.world), timeout=60)
    return max(
        abs(value - sum(saved for _, saved in of_a_step))
        for of_a_step in zip(*stages, strict=True)
        for value, _ in of_a_step
    )
