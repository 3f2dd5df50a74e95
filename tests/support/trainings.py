"""Whole training steps of small models, and the cost of each: operations, messages, bytes. For tests and benchmarks.

    for name, training in TRAININGS.items():
        with testing.Ranks(training.layout.world) as ranks:
            print(name, ranks.run(counted, training)[0])

Stock does each of them right on every release that can do it at all. So a patch has nothing to fix there, and its
additions to a count are its price.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim.testing.cpu import optimizer_on_cpu, type_on_a_gpu
from shim.testing.footprint import Footprint
from shim.testing.fp8_layer import delayed_scaling, fp8_linear, fp8_region, fresh_fp8_state
from shim.testing.layout import Layout, layout_initialised
from shim.testing.model import build_gpt
from shim.testing.multi_tensor import multi_tensor_ops
from shim.testing.oracle import run_packed, run_schedule
from shim.testing.packing import PackedRow, pack, random_sequences
from shim.testing.proof import on_device

__all__ = [
    "TE_TRAININGS",
    "TRAININGS",
    "Counts",
    "Training",
    "called",
    "counted",
    "counts_of",
    "python_calls",
    "stepping",
    "trained",
]

LENGTHS, ALIGN = (24, 40), 8
STEPS = 3
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}
# Without Transformer Engine, 0.13 routes in float64 only.
EXPERTS |= {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01, "moe_router_dtype": "fp64"}
# The other dispatcher keeps sizes on the device that gloo takes from the host.
ALL_GATHER = {**EXPERTS, "moe_token_dispatcher_type": "allgather"}


@dataclass(frozen=True)
class Counts:
    """The cost of a step of one rank.

    operations: of torch, below autograd. messages: operations of torch.distributed. message_bytes: of the tensors that
    go into them. peak_bytes: the most that storages made in the step held at one time.
    """

    operations: int
    messages: int
    message_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Training:
    """A training step.

    kind: "row" trains on one row [1, s], "packed" on sequences in a THD row, "schedule" on two packed rows as
    microbatches, by the schedule of the release. optimizer: "" for a step without one, "plain" or "distributed".
    build: makes the model from the options.
    "fp8" and "fp8, recompute" train two layers of Transformer Engine's Python code (see shim.testing.fp8_layer).
    """

    kind: str = "row"
    layout: Layout = field(default_factory=Layout)
    optimizer: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    build: Callable[..., Any] = build_gpt


TRAININGS: Mapping[str, Training] = {
    "dense": Training(optimizer="plain"),
    "packed": Training("packed"),
    "recompute": Training(options=FULL),
    "multi-token prediction": Training(options={"mtp_num_layers": 1}),
    "experts": Training(options=EXPERTS, optimizer="plain"),
    "experts, recompute": Training(options={**EXPERTS, **FULL}),
    "TP 2, SP": Training(layout=Layout(tp=2, sequence_parallel=True), optimizer="plain", options={"mtp_num_layers": 1}),
    "TP 2, distributed optimizer": Training(layout=Layout(tp=2), optimizer="distributed"),
    "CP 2, packed": Training("packed", Layout(cp=2)),
    "PP 2": Training("schedule", Layout(pp=2)),
    "EP 2": Training(layout=Layout(ep=2), options=ALL_GATHER, optimizer="plain"),
}

# Beside Transformer Engine's Python sources, after transformer_engine_on_cpu().
TE_TRAININGS: Mapping[str, Training] = {
    "FP8": Training("fp8"),
    "FP8, recompute": Training("fp8, recompute"),
}


@contextlib.contextmanager
def stepping(training: Training, te: bool = False) -> Iterator[Callable[[], object]]:
    """A step of a training on this rank, after one that makes the one-time allocations.

    te: whether it runs beside Transformer Engine.
    """
    fused = multi_tensor_ops() if te else nullcontext()  # by which its Adam steps, and gradients are clipped
    with on_device("cpu", te=te), fused, layout_initialised(training.layout), _fresh(training):
        torch.manual_seed(0)
        _, step = _prepared(training)
        step()
        yield step


def counted(training: Training, te: bool = False) -> Counts:
    """A step of a training on this rank."""
    with stepping(training, te) as step:
        return counts_of(step)


def _fresh(training: Training) -> AbstractContextManager[Any]:
    """Transformer Engine's state of FP8 would grow from one training to the next."""
    return fresh_fp8_state() if training.kind.startswith("fp8") else nullcontext()


def counts_of(step: Callable[[], object], times: int = STEPS) -> Counts:
    """Of the first of these steps, and the lowest peak: messages under way hold memory for as long as they please."""
    found = []
    for _ in range(times):
        with Footprint() as footprint:
            step()
        found.append(footprint)
    first, peak = found[0], min(footprint.peak_bytes for footprint in found)
    return Counts(first.operations, first.collectives.total(), first.message_bytes, peak)


def called(training: Training) -> int:
    """The Python calls of a step of a training on this rank, after two steps."""
    with stepping(training) as step:
        step()
        return python_calls(step)


def trained(training: Training, steps: int = 3) -> dict[str, Tensor]:
    """The weights of this rank after some steps, and its gradients of the last one (as "gradient of NAME"), by name."""
    with on_device("cpu", te=False), layout_initialised(training.layout):
        torch.manual_seed(0)
        model, step = _prepared(training)
        for _ in range(steps):
            step()
        found = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        gradients = {name: getattr(w, "main_grad", w.grad) for name, w in model.named_parameters()}
        return {**found, **{f"gradient of {name}": g.clone() for name, g in gradients.items() if g is not None}}


class _TrainersRow(PackedRow):
    """As trainers give it to a model: queries and keys have their offsets in one tensor."""

    def packed_seq_params(self, **extra: Any) -> Any:
        packed = super().packed_seq_params(**extra)
        packed.cu_seqlens_kv, packed.cu_seqlens_kv_padded = packed.cu_seqlens_q, packed.cu_seqlens_q_padded
        return packed


def _prepared(training: Training) -> tuple[Any, Callable[[], object]]:
    """The model, and a step of its training."""
    if training.kind.startswith("fp8"):
        return _prepared_in_fp8(training.kind.endswith("recompute"))
    sharded = {"sequence_parallel": True} if training.layout.sequence_parallel else {}
    options = {"mtp_num_layers": None} if training.build is build_gpt else {}
    model: Any = training.build(**{**options, **sharded, **training.options})
    if training.kind != "row":
        rows = [_TrainersRow(**vars(pack(random_sequences(LENGTHS, seed=seed), align=ALIGN))) for seed in (0, 1)]
        if training.kind == "schedule":
            return model, lambda: run_schedule(model, rows)
        return model, lambda: run_packed(model, rows[0])
    ids = torch.arange(sum(LENGTHS))[None] % 64

    def passes(model: Any) -> None:
        model(ids, ids, None, labels=ids).mean().backward()

    if training.optimizer:
        return model, _with_optimizer(model, passes, training.optimizer == "distributed")

    def run() -> None:
        for weight in model.parameters():
            weight.grad = None
        passes(model)

    return model, run


def _prepared_in_fp8(recompute: bool) -> tuple[Any, Callable[[], object]]:
    """Two layers of Transformer Engine with delayed scaling, and a step of their training."""
    from transformer_engine.pytorch.distributed import checkpoint

    layers = torch.nn.Sequential(*(fp8_linear(64, seed=seed) for seed in (0, 1)))
    recipe, values = delayed_scaling(history=4), torch.randn(32, 64, requires_grad=True)

    def run() -> None:
        for weight in layers.parameters():
            weight.grad = None
        with fp8_region(recipe):
            output = values
            for layer in layers:
                output = checkpoint(layer, output) if recompute else layer(output)
        output.sum().backward()

    return layers, run


def python_calls(step: Callable[[], object], files: set[str] | None = None) -> int:
    """How many Python functions a step calls, without those that a collection of garbage calls.

    files: gets the names of the files that they are from.
    """
    found = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal found
        if event == "call":
            found += 1
            if files is not None:
                files.add(frame.f_code.co_filename)

    collects, before = gc.isenabled(), sys.getprofile()
    gc.disable()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return found


def _with_optimizer(model: Any, passes: Callable[[Any], None], distributed: bool) -> Callable[[], object]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig

    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, overlap_grad_reduce=False)
    wrapped = DistributedDataParallel(model.config, ddp, model)
    config = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0, use_distributed_optimizer=distributed)
    optimizer = optimizer_on_cpu(config, [wrapped])

    def run() -> None:
        with mock.patch.object(torch.Tensor, "type", type_on_a_gpu):
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            passes(wrapped)
            finalize_model_grads([wrapped])
            optimizer.step()

    return run
