"""Proof of offloaded-fp32-weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.patches.megatron_core._proof_offloading import offloading
from shim.testing.proof import Here, proof

HALF: dict[str, Any] = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}


def trained(offload: bool, mixed: bool, aware: bool = False) -> list[Tensor]:
    """The weights after three steps of the distributed optimizer.

    mixed: of a model in bf16 whose norms are in fp32. aware: use_precision_aware_optimizer.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    torch.manual_seed(0)
    model: Any = testing.build_gpt(num_layers=1, mtp_num_layers=None, **(HALF if mixed else {}))
    if mixed:
        for name, weight in model.named_parameters():
            weight.data = weight.data.to(torch.float32 if "norm" in name else torch.bfloat16)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=False, grad_reduce_in_fp32=True
    )
    settings: dict[str, Any] = {"lr": 1e-2, "clip_grad": 0.0, "bf16": mixed, "use_distributed_optimizer": True}
    if offload:
        settings |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
        settings["use_precision_aware_optimizer"] = aware
    with offloading():
        wrapped: Any = DistributedDataParallel(model.config, ddp, model)
        optimizer: Any = get_megatron_optimizer(OptimizerConfig(optimizer="adam", **settings), [wrapped])
        for number in range(3):
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            for weight in model.parameters():
                generator = torch.Generator().manual_seed(100 * number + weight.numel())
                weight.main_grad.copy_(torch.randn(weight.shape, generator=generator))
            optimizer.step()
    return [weight.detach().float() for weight in model.parameters()]


def off(mixed: bool, aware: bool) -> float:
    found, right = (
        torch.cat([weight.flatten() for weight in trained(offload, mixed, aware)]) for offload in (True, False)
    )
    return float((found - right).norm() / right.norm())


@proof(
    "weights off by {:.1e} after three steps",
    bound=1e-6,
    defect="crash",
    crashes=r"^ValueError: can't optimize a non-leaf Tensor",
)
def weights_in_fp32_train_with_a_half_of_them_on_the_cpu(here: Here) -> float:
    """With optimizer_cpu_offload and the distributed optimizer a model with a weight in fp32 cannot be trained.

    To reproduce: wrap a GPTModel in fp32 in DistributedDataParallel, and call get_megatron_optimizer with
    `OptimizerConfig(use_distributed_optimizer=True, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)`. A
    model in bf16 whose norms are in fp32 raises as well, with and without `use_precision_aware_optimizer=True`.

    `_build_model_and_main_param_groups` slices weights in fp32 with autograd, and HybridDeviceOptimizer hands the
    slices to torch.optim.Optimizer, which takes leaves alone: "can't optimize a non-leaf Tensor". Right is what the
    optimizer without an offload trains.
    """
    cases = ((False, False), (True, False), (True, True))
    return max(here.run(off, mixed, aware)[0] for mixed, aware in cases)
