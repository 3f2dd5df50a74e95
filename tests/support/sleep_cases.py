"""Trainings on the pretended CUDA that sleep and wake between two steps, and what they hold on the device meanwhile."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import shim
from shim import testing
from shim.patches.megatron_core._proof_aware_adam import aware_adam, aware_config
from shim.patches.megatron_core.muon_qkv_shapes.proof import muon
from shim.testing import Layout, pretend_cuda
from shim.testing.cpu import optimizer_on_cpu, storage_shared_in_python, torch_norm_under_sequence_parallelism
from shim.testing.pretend_cuda import DeviceTensor, values_of
from shim.testing.proof import CannotRunError
from shim.testing.schedules import run_microbatches

TOKENS, VOCABULARY = 16, 64
FLAGS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# The scale of the loss grows behind every second step.
SCALER = {"initial_loss_scale": 256.0, "min_loss_scale": 1.0, "loss_scale_window": 2, "hysteresis": 1}
EXPERTS: Mapping[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "none",
    "moe_router_dtype": "fp64",
    "moe_token_dispatcher_type": "allgather",
}


@dataclass(frozen=True)
class Case:
    """A training. optimizer: "plain", "distributed", "sgd", "muon", or "aware" and "offloaded", which are distributed.

    half: the type of weights, or None for fp32; fp16 has a scaler of the loss. sums_in_half: of gradients, by DDP.
    model: options of the model; mtp: layers of multi-token prediction.
    """

    optimizer: str = "plain"
    half: torch.dtype | None = torch.bfloat16
    layout: Layout = field(default_factory=Layout)
    world: int = 1
    lora: bool = False
    mtp: int | None = None
    sums_in_half: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def distributed(self) -> bool:
        return self.optimizer in ("distributed", "aware", "offloaded")


class Training:
    """A model on the device, and its optimizer."""

    def __init__(self, case: Case, make: Any = optimizer_on_cpu) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig

        self.case = case
        options = {"mtp_num_layers": case.mtp, **case.model}
        if case.half:
            options |= {FLAGS[case.half]: True, "params_dtype": case.half, "pipeline_dtype": case.half}
        if case.layout.sequence_parallel:
            options["sequence_parallel"] = True
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=case.distributed,
            overlap_grad_reduce=False,
            grad_reduce_in_fp32=not case.sums_in_half,
        )
        self.models: list[Any] = []
        for model in testing.build_chunks(**options):
            if case.lora:
                testing.add_lora(model)
            self.models.append(DistributedDataParallel(model.config, ddp, model.to(case.half).cuda()))
        self.model = self.models[0]
        kind = case.optimizer if case.optimizer in ("sgd", "muon") else "adam"
        aware = case.optimizer == "aware"
        config = (aware_config if aware else functools.partial(OptimizerConfig, optimizer=kind))(
            lr=1e-2,
            weight_decay=0.1,
            clip_grad=0.0,
            **({FLAGS[case.half]: True} if case.half else {}),
            **(SCALER if case.half == torch.float16 else {}),
            use_distributed_optimizer=case.distributed,
            **({"sgd_momentum": 0.9} if kind == "sgd" else {}),
            **(
                {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
                if case.optimizer == "offloaded"
                else {}
            ),
        )
        self.optimizer: Any = make(config, self.models)
        for model in self.models:
            model.config.grad_scale_func = self.optimizer.scale_loss

    def step(self, number: int) -> None:
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.passes(number)
        self.optimizer.step()

    def passes(self, number: int) -> None:
        """Forward and backward passes of two microbatches, and the sum of their gradients over ranks."""
        from megatron.core.distributed import finalize_model_grads

        rows = [row_of(2 * number + each) for each in range(2)]
        run_microbatches(self.models, rows, mean_of_row, TOKENS)
        finalize_model_grads(self.models)

    def values(self) -> dict[str, Tensor]:
        """Weights, buffers and all states of the optimizer."""
        found = {"scale of the loss": torch.tensor(float(self.optimizer.get_loss_scale()))}
        for chunk, model in enumerate(self.models):
            found |= {f"{chunk} {name}": copied(value) for name, value in model.module.named_parameters()}
            found |= {f"{chunk} buffer {name}": copied(value) for name, value in model.module.named_buffers()}
        for place, each in enumerate(getattr(self.optimizer, "chained_optimizers", [self.optimizer])):
            inner = getattr(each, "optimizer", each)
            weights = [weight for group in inner.param_groups for weight in group["params"]]
            for number, weight in enumerate(weights):
                found[f"main {place} {number}"] = copied(weight)
                for name, value in inner.state.get(weight, {}).items():
                    if isinstance(value, Tensor):
                        found[f"{name} {place} {number}"] = copied(value)
        return found


def copied(tensor: Tensor) -> Tensor:
    with pretend_cuda.uncounted():
        return values_of(tensor.detach()).clone()


def row_of(number: int) -> Tensor:
    return torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(number)).cuda()


def mean_of_row(row: Tensor, chunk: Any) -> tuple[Tensor, Any]:
    losses = chunk(row, torch.arange(TOKENS, device="cuda")[None], None, labels=row.roll(-1, 1))
    return losses, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})


def device_bytes() -> int:
    """What all tensors of the device hold, seen by the garbage collector; each storage once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if type(each) in (DeviceTensor, nn.Parameter) and isinstance(each, DeviceTensor) and each.is_cuda:
            storages[each.values.untyped_storage()._cdata] = each.values.untyped_storage().nbytes()
    return sum(storages.values())


@contextlib.contextmanager
def as_on_a_gpu(case: Case) -> Iterator[Any]:
    """The pretended device, and what a release needs without Transformer Engine. Yields what makes an optimizer."""
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    with contextlib.ExitStack() as undo:
        undo.enter_context(pretend_cuda.cuda_pretended())
        undo.enter_context(torch_norm_under_sequence_parallelism())
        undo.enter_context(storage_shared_in_python())
        undo.enter_context(mock.patch.object(distrib_optimizer, "quantize_param_shard", lambda *a, **k: None))
        if case.optimizer == "aware":
            undo.enter_context(aware_adam())
        if case.optimizer == "offloaded":
            undo.enter_context(
                mock.patch.object(optimizer_config, "is_te_min_version", lambda *_, **__: True, create=True)
            )
        if "num_moe_experts" in case.model:
            from megatron.core.transformer.moe import moe_utils

            # 0.16 looks up a name in each step that it has with Transformer Engine only.
            undo.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        undo.enter_context(testing.layout_initialised(case.layout))
        torch.manual_seed(0)
        yield undo.enter_context(muon()) if case.optimizer == "muon" else optimizer_on_cpu


def need(case: Case) -> None:
    """Raises CannotRunError if this release lacks what the case is about."""
    from megatron.core.optimizer import OptimizerConfig

    if case.optimizer == "muon" and "muon_momentum" not in inspect.signature(OptimizerConfig).parameters:
        raise CannotRunError("this release has no Muon")


@dataclass
class Slept:
    """bytes: before, asleep, after. freed: by kind. dropped: of that, the workspace, which is not put back.

    left: as of the handle. differ: names of values that differ from those without a sleep. names: of what was freed.
    """

    bytes: tuple[int, int, int]
    freed: dict[str, int]
    dropped: int
    left: dict[str, dict[str, Any]]
    differ: list[str]
    names: set[str]


def offloaded(training: Training) -> Any:
    return shim.offload(training.models, training.optimizer)


def by_methods(training: Training, buffers_first: bool = False) -> Any:
    """Asleep by megatron-core's own methods."""
    buffers = [each for model in training.models for each in (*model.buffers, *model.expert_parallel_buffers)]
    sleep = [training.optimizer.offload_to_cpu, *(each.offload_to_cpu for each in buffers)]
    wake = [training.optimizer.restore_from_cpu, *(each.reload_from_cpu for each in buffers)]
    for each in [*reversed(sleep), *reversed(sleep)] if buffers_first else [*sleep, *sleep]:  # again moves nothing
        each()
    return others_handle(lambda: [each() for each in (wake if buffers_first else reversed(wake))])


def others_handle(restore: Callable[[], Any]) -> Any:
    """As of shim.offload, for other people's functions, which say neither what they have freed nor what is left."""
    return SimpleNamespace(restore=restore, freed={"gradients": {"workspace": 0}}, left={})


def slept(case: Case, sleep: Callable[[Training], Any] = offloaded) -> Slept:
    """Two steps, sleep, wake and two steps beside four steps, on this rank."""
    need(case)
    gc.freeze()  # hundreds of thousands of objects of modules, none of which is a tensor of the device
    with as_on_a_gpu(case) as make:
        training = Training(case, make)
        for number in range(4):
            training.step(number)
        right = training.values()
    del training
    with as_on_a_gpu(case) as make:
        others = device_bytes()  # of the training before, which globals of a release keep
        training = Training(case, make)
        for number in range(2):
            training.step(number)
        before = device_bytes() - others
        handle = sleep(training)
        asleep = device_bytes() - others
        handle.restore()
        after = device_bytes() - others
        for number in range(2, 4):
            training.step(number)
        found = training.values()
    assert found.keys() == right.keys()
    differ = [name for name, value in found.items() if not torch.equal(value, right[name])]
    freed = {kind: sum(parts.values()) for kind, parts in handle.freed.items()}
    names = {name for parts in handle.freed.values() for name in parts}
    return Slept((before, asleep, after), freed, handle.freed["gradients"]["workspace"], handle.left, differ, names)


def refused_asleep(case: Case) -> list[str]:
    """What a training that sleeps does not refuse, of forward, a step, and what a checkpoint is made of."""
    with as_on_a_gpu(case) as make:
        training = Training(case, make)
        training.step(0)
        model, optimizer = training.model, training.optimizer
        calls: dict[str, Callable[[], Any]] = {
            "forward": lambda: training.passes(0),
            "zero_grad_buffer": lambda: model.zero_grad_buffer(),  # looked up when it is called, as a trainer does
            "step": lambda: optimizer.step(),
            "model.state_dict": lambda: model.state_dict(),
            "model.sharded_state_dict": lambda: model.module.sharded_state_dict(),
            "optimizer.state_dict": lambda: optimizer.state_dict(),
            "optimizer.sharded_state_dict": lambda: optimizer.sharded_state_dict({}),
            "optimizer.reload_model_params": lambda: optimizer.reload_model_params(),
        }
        with offloaded(training):
            allowed = not_refused(calls)
        training.step(1)
        return allowed


def not_refused(calls: Mapping[str, Callable[[], Any]]) -> list[str]:
    """The names of the calls that raise no OffloadError."""
    allowed = []
    for name, call in calls.items():
        with contextlib.suppress(shim.OffloadError):
            call()
            allowed.append(name)
    return allowed
