"""An optimizer of several parameter groups, for the proofs of a resume."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from shim import testing
from shim.testing.cpu import optimizer_on_cpu, type_on_a_gpu

LR, EMBEDDING_LR = 1e-3, 5e-4


def optimizer_of(distributed: bool, **settings: Any) -> Any:
    """An optimizer of a new GPT model, whose embedding and output layer have a separate learning rate.

    It has taken one step, so it has states. The same seed gives the same states. settings: of OptimizerConfig.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    model = testing.build_gpt(num_layers=1, mtp_num_layers=None)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, overlap_grad_reduce=False)
    wrapped = DistributedDataParallel(model.config, ddp, model)
    config = OptimizerConfig(
        **{
            "optimizer": "adam",
            "lr": LR,
            "min_lr": LR / 10,
            "decoupled_lr": EMBEDDING_LR,
            "decoupled_min_lr": EMBEDDING_LR / 10,
            "clip_grad": 0.0,
            "use_distributed_optimizer": distributed,
            **settings,
        }
    )
    optimizer = optimizer_on_cpu(config, [wrapped])
    with mock.patch.object(torch.Tensor, "type", type_on_a_gpu):
        row = torch.arange(8)[None]
        model(row, row, None, labels=row).mean().backward()
        wrapped.finish_grad_sync()
        optimizer.prepare_grads()
        # Not its own step: in 0.12 that of the distributed optimizer needs Transformer Engine for weights of any type.
        inner_of(optimizer).step()
    return optimizer


def inner_of(optimizer: Any) -> Any:
    """The optimizer of torch inside."""
    return (optimizer.chained_optimizers[0] if hasattr(optimizer, "chained_optimizers") else optimizer).optimizer


def fields(optimizer: Any) -> list[dict[str, Any]]:
    """Of each parameter group, all but its parameters and the number of its steps."""
    return [{key: group[key] for key in group if key not in ("params", "step")} for group in optimizer.param_groups]
