"""Proof of optimizer-restored-shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.patches.megatron_core._proof_aware_adam import aware_adam, aware_config
from shim.patches.megatron_core._proof_offloading import offloading, take_step
from shim.testing.proof import Here, LacksFeatureError, proof

HALF: Mapping[str, Any] = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
OF_0_15 = r"^NameError: name 'logging' is not defined$"


def require_methods() -> None:
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    if not hasattr(MegatronOptimizer, "restore_from_cpu"):
        raise LacksFeatureError("its optimizers cannot be offloaded")


def trained(aware: bool = True, half: bool = True, sleep: bool = False) -> dict[str, Tensor]:
    """The weights after four steps of the distributed optimizer, between which it is on the host, or not."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    require_methods()
    torch.manual_seed(0)
    model: Any = testing.build_gpt(num_layers=1, mtp_num_layers=None, **(HALF if half else {}))
    model = model.bfloat16() if half else model
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=False, grad_reduce_in_fp32=True
    )
    settings = {"lr": 1e-2, "clip_grad": 0.0, "bf16": half, "use_distributed_optimizer": True}
    with offloading():
        wrapped: Any = DistributedDataParallel(model.config, ddp, model)
        config = aware_config(**settings) if aware else OptimizerConfig(optimizer="adam", **settings)
        optimizer = get_megatron_optimizer(config, [wrapped])
        for number in range(4):
            if sleep and number == 2:
                optimizer.offload_to_cpu()
                optimizer.restore_from_cpu()
            take_step(wrapped, optimizer, number)
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def moved_by_a_sleep() -> int:
    """States on the host that are on the device once the optimizer was offloaded and restored."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    require_methods()
    model: Any = testing.build_gpt(num_layers=1, mtp_num_layers=None, **HALF).bfloat16()
    with offloading():
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False)
        wrapped: Any = DistributedDataParallel(model.config, ddp, model)
        settings: dict[str, Any] = {"bf16": True, "use_distributed_optimizer": True}
        settings |= {"use_precision_aware_optimizer": True}
        settings |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
        optimizer: Any = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, **settings), [wrapped])
        for weight in model.parameters():
            weight.main_grad.fill_(1e-3)
        optimizer.step()
        chained = getattr(optimizer, "chained_optimizers", [optimizer])

        def host() -> set[tuple[int, str]]:
            held = [states for each in chained for states in each.optimizer.state.values()]
            tensors = [(id(states), name, value) for states in held for name, value in states.items()]
            return {(of, name) for of, name, value in tensors if isinstance(value, Tensor) and not value.is_cuda}

        before = host()
        assert before
        optimizer.offload_to_cpu()
        optimizer.restore_from_cpu()
        return len(before - host())


def changed_by_a_sleep() -> int:
    """Weights that differ after four steps if the optimizer is offloaded and restored between them."""
    with aware_adam():
        right, found = trained(), trained(sleep=True)
    return sum(not torch.equal(found[name], right[name]) for name in right)


def wrapped_in_half(distributed: bool = False, half: bool = True, lora: bool = False) -> tuple[Any, Any]:
    """A model in DDP, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model: Any = testing.build_gpt(num_layers=1, mtp_num_layers=None, **(HALF if half else {}))
    if lora:
        testing.add_lora(model)
    model = model.bfloat16() if half else model
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, overlap_grad_reduce=False)
    wrapped = DistributedDataParallel(model.config, ddp, model)
    config = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0, bf16=half, use_distributed_optimizer=distributed)
    return wrapped, get_megatron_optimizer(config, [wrapped])


def weights_moved_by_the_optimizer() -> int:
    """Weights of a model in fp32 that have other memory while the plain optimizer is on the host."""
    with offloading():
        wrapped, optimizer = wrapped_in_half(half=False)
        require_methods()
        before = {name: weight.data_ptr() for name, weight in wrapped.named_parameters()}
        optimizer.offload_to_cpu()
        found = {name: weight.data_ptr() for name, weight in wrapped.named_parameters()}
        optimizer.restore_from_cpu()
        return sum(found[name] != before[name] for name in before)


def gradients_left() -> int:
    """Gradients of main weights on the device while the optimizer is on the host."""
    with offloading():
        _, optimizer = wrapped_in_half()
        require_methods()
        chained = getattr(optimizer, "chained_optimizers", [optimizer])
        weights = [weight for each in chained for group in each.optimizer.param_groups for weight in group["params"]]
        for weight in weights:
            weight.grad = torch.ones_like(weight)  # as a step makes it of a sum in bf16
        gradients = [weight.grad for weight in weights]
        optimizer.offload_to_cpu()
        found = sum(gradient.untyped_storage().nbytes() > 0 for gradient in gradients)
        optimizer.restore_from_cpu()
        return found


def weights_left(lora: bool) -> int:
    """Weights on the device while all buffers of the model are on the host: of a plain optimizer, or with LoRA."""
    with offloading():
        wrapped, _ = wrapped_in_half(distributed=lora, lora=lora)
        buffers = [*wrapped.buffers, *wrapped.expert_parallel_buffers]
        if not hasattr(buffers[0], "offload_to_cpu"):
            raise LacksFeatureError("its buffers cannot be offloaded")
        storages = [weight.untyped_storage() for weight in wrapped.module.parameters()]
        for buffer in buffers:
            buffer.offload_to_cpu()
        found = sum(storage.nbytes() > 0 for storage in storages)
        for buffer in buffers:
            buffer.reload_from_cpu()
        return found


@proof(
    "{:.0f} of 11 weights differ after 4 steps",
    right="bit-equal",
    crashes=OF_0_15,
)
def a_restored_optimizer_trains_the_model(here: Here) -> int:
    """A precision-aware optimizer trains no weight of the model any more, once it was offloaded and restored.

    To reproduce: wrap a GPTModel in bf16 in DistributedDataParallel, and make its optimizer by get_megatron_optimizer
    with `OptimizerConfig(bf16=True, use_distributed_optimizer=True, use_precision_aware_optimizer=True)`. Take two
    steps, call `optimizer.offload_to_cpu()` and `optimizer.restore_from_cpu()`, and take two more. Compare with four
    steps.

    The shards that it steps on are views of DDP's buffer of weights. `restore_from_cpu` gives them other memory, and
    this optimizer leaves nobody to copy from there. Views should stay where they are. In 0.15 both methods raise
    NameError: name 'logging' is not defined.
    """
    return here.run(changed_by_a_sleep)[0]


@proof(
    "{:.0f} states of weights on the host moved to the device",
    right="states on the host stay there",
    crashes=OF_0_15,
)
def states_on_the_host_stay_there(here: Here) -> int:
    """After `restore_from_cpu` an optimizer with optimizer_cpu_offload has states of weights of the CPU on the GPU.

    To reproduce: as above, with `optimizer_cpu_offload=True` and `optimizer_offload_fraction=0.5`. Take a step, and
    note which states are on the CPU. Call `optimizer.offload_to_cpu()` and `optimizer.restore_from_cpu()`.

    `restore_from_cpu` moves every state that is not on the GPU, also those of weights that this optimizer keeps on the
    CPU. Its next step raises "Tensors of the same index must be on the same device". Right is to put back what
    `offload_to_cpu` has moved.
    """
    return here.run(moved_by_a_sleep)[0]


@proof(
    "{:.0f} of 11 weights of the model moved",
    right="they stay",
    crashes=OF_0_15,
)
def weights_of_the_model_stay(here: Here) -> int:
    """`offload_to_cpu` of the optimizer moves the model, if it is in fp32 and the optimizer is not distributed.

    To reproduce: wrap a GPTModel in fp32 in DistributedDataParallel, and make its optimizer by get_megatron_optimizer
    with `OptimizerConfig()`. Call `optimizer.offload_to_cpu()`, as training by reinforcement does before it samples
    from the model. All weights of the model are on the CPU then. After `restore_from_cpu()` they are back, and have
    lost the hooks of DistributedDataParallel: torch makes a new gradient accumulator for data of another device.
    """
    return here.run(weights_moved_by_the_optimizer)[0]


@proof(
    "{:.0f} gradients stay on the device",
    right="none",
    defect="memory",
    crashes=OF_0_15,
)
def gradients_of_main_weights_leave(here: Here) -> int:
    """`offload_to_cpu` of an optimizer leaves the gradients of main weights on the GPU: four bytes for each parameter.

    To reproduce: wrap a GPTModel in bf16 in DistributedDataParallel with the defaults of its config, which sum
    gradients in bf16. Take a step. Call `optimizer.offload_to_cpu()`, and look at `grad` of the weights in
    `optimizer.optimizer.param_groups`.
    """
    return here.run(gradients_left)[0]


@proof("{:.0f} of 11 weights stay on the device", right="none", defect="memory")
def weights_in_no_buffer_leave(here: Here) -> int:
    """`offload_to_cpu` of all buffers leaves a model with a plain optimizer on the GPU.

    To reproduce: wrap a GPTModel in DistributedDataParallel with `use_distributed_optimizer=False`, and call
    `offload_to_cpu()` of each of its buffers. They hold gradients alone.
    """
    return here.run(weights_left, False)[0]


@proof("{:.0f} of 11 weights stay on the device", right="none", defect="memory")
def frozen_weights_leave(here: Here) -> int:
    """`offload_to_cpu` of all buffers leaves frozen weights on the GPU, which under LoRA are nearly all.

    To reproduce: freeze the weights of a GPTModel, add adapters, wrap it in DistributedDataParallel, and call
    `offload_to_cpu()` of each of its buffers. Frozen weights lie in none.
    """
    return here.run(weights_left, True)[0]
