"""Proof of sleep-methods. On a CPU nothing is freed; tests on a pretended CUDA count the memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.patches.megatron_core._proof_offloading import offloading, take_step
from shim.testing.proof import CannotRunError, Here, proof


def version() -> tuple[int, ...]:
    return tuple(int(part) for part in testing.release().split(".")[:2])


def trained(sleep: bool) -> dict[str, Tensor]:
    """The weights after four steps of the distributed optimizer, between which all is on the host, or not."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    torch.manual_seed(0)
    model: Any = testing.build_gpt(num_layers=1, mtp_num_layers=None)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False)
    with offloading():
        wrapped: Any = DistributedDataParallel(model.config, ddp, model)
        config = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0, use_distributed_optimizer=True)
        optimizer: Any = get_megatron_optimizer(config, [wrapped])
        for number in range(4):
            if sleep and number == 2:
                sleep_and_wake(wrapped, optimizer)
            take_step(wrapped, optimizer, number)
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def sleep_and_wake(wrapped: Any, optimizer: Any) -> None:
    buffers = [*wrapped.buffers, *wrapped.expert_parallel_buffers]
    own = version() >= (0, 15)  # of the optimizer. What is wrong with them is about optimizer-restored-shards
    wrapped.offload_grad_buffers()
    if not own:
        optimizer.offload_to_cpu()
    for buffer in buffers:
        buffer.offload_to_cpu(move_params=True, move_grads=True)
    for buffer in buffers:
        buffer.reload_from_cpu(move_params=True, move_grads=True)
    if not own:
        optimizer.restore_from_cpu()
    wrapped.restore_grad_buffers()


def changed_by_a_sleep() -> int:
    if version() >= (0, 16):
        raise CannotRunError("from 0.16 on the methods are there, and need a device beside the CPU")
    right, found = trained(False), trained(True)
    return sum(not torch.equal(found[name], right[name]) for name in right)


@proof(
    "{:.0f} of 11 weights differ after 4 steps",
    right="bit-equal",
    defect="missing",
    crashes=r"^AttributeError: .* has no attribute 'offload_grad_buffers'",
)
def methods_that_move_training_to_the_host_are_there(here: Here) -> int:
    """Optimizers, buffers and DDP lack the methods by which later releases free memory for a rollout.

    To reproduce: wrap a GPTModel in DistributedDataParallel, make its optimizer by get_megatron_optimizer, and take two
    steps. Call `ddp.offload_grad_buffers()`, `optimizer.offload_to_cpu()`, and `buffer.offload_to_cpu()` of each of
    `ddp.buffers`, then `reload_from_cpu()`, `restore_from_cpu()` and `restore_grad_buffers()`. Take two more steps, and
    compare with four.

    The optimizer's methods came with 0.15, the others with 0.16.
    """
    return here.run(changed_by_a_sleep)[0]
