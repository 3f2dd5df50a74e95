"""Proof of offloaded-optimizer-classes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from shim.patches.megatron_core._proof_offloading import offloading
from shim.testing.proof import Here, proof

BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def groups(weight_on_gpu: Any = torch.optim.SGD) -> list[dict[str, Any]]:
    """The parameter groups of a HybridDeviceOptimizer as a checkpoint has them."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    with offloading():
        weights = [torch.ones(4, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
        optimizer = HybridDeviceOptimizer(
            [{"params": weights, "lr": 1e-2, "weight_decay": 0.0}],
            offload_fraction=0.5,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=weight_on_gpu,
            param_update_in_fp32=True,
        )
        return [{**group, "params": []} for group in optimizer.param_groups]


def write(directory: str, state: dict[str, Any]) -> None:
    """The common part of a checkpoint, as releases up to 0.18 write it."""
    torch.save(state, Path(directory, "common.pt"))
    Path(directory, "metadata.json").write_text(json.dumps(BACKENDS))


def read(directory: str) -> Any:
    from megatron.core import dist_checkpointing

    return dist_checkpointing.load_common_state_dict(directory)


def groups_lost() -> int:
    """How many parameter groups do not come back as they were saved."""
    saved = groups()
    with tempfile.TemporaryDirectory() as directory:
        write(directory, {"optimizer": {"optimizer": {"param_groups": saved}}, "iteration": 2})
        found = read(directory)["optimizer"]["optimizer"]["param_groups"]
    assert "cpu_optimizer_cls" in saved[0]
    return sum(one != other for one, other in zip(saved, found, strict=True))


@proof(
    "{:.0f} of 1 parameter groups lost",
    right="the parameter group is what was saved",
    defect="crash",
    crashes=r"^UnpicklingError: Weights only load failed",
)
def a_common_file_with_optimizer_classes_is_loaded(here: Here) -> int:
    """No part of a fully_reshardable checkpoint of the CPU-offloaded optimizer can be loaded: UnpicklingError.

    To reproduce: train with `OptimizerConfig(optimizer_cpu_offload=True, use_precision_aware_optimizer=True,
    use_distributed_optimizer=True)` on a release up to 0.18, save by dist_checkpointing with
    `metadata={"distrib_optim_sharding_type": "fully_reshardable"}`, and load on 0.14 to 0.16, 0.17.1 or later.

    `HybridDeviceOptimizer` has `cpu_optimizer_cls` and `gpu_optimizer_cls` in its defaults, so its parameter groups
    have them, and common.pt. `load_common` calls torch.load with its default `weights_only`, which allows no class of
    an optimizer. It should be loaded as it was saved.
    """
    return here.run(groups_lost)[0]
