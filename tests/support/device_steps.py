"""Training steps on the pretended CUDA, and their counts on stock and under patches; also for benchmarks/device.py.

A step is built inside a layout. It runs before it is counted, so that what a model makes once does not count.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from trainings import EXPERTS, FULL

import shim
from shim import testing
from shim.patches.megatron_core import _proof_mla
from shim.patches.megatron_core.mrope_thd import proof as mrope
from shim.patches.megatron_core.paged_stash import proof as paged_stash
from shim.patches.megatron_core.router_replay import proof as router_replay
from shim.testing import Layout, pretend_cuda
from shim.testing.cpu import storage_shared_in_python, torch_norm_under_sequence_parallelism
from shim.testing.proof import CannotRunError

# As many sequences as rows have at least that are worth packing: stock's loops take longer with each of them.
LENGTHS, ALIGN, VOCABULARY = (9, 14, 2, 16, 5, 7, 12, 3, 8, 4), 8, 64
EQUAL = (16,) * len(LENGTHS)
PATCHES = Path(shim.__file__).parent.parent / "patches"

Step = Callable[[], list[Tensor]]  # returns gradients


@dataclass(frozen=True)
class DeviceStep:
    """A step of one rank. build: makes the model on the device and returns the step; inside it, a context is entered
    that lasts as long as the step. options: of patches, as the step needs them. warm: steps before the counted one."""

    build: Callable[[contextlib.ExitStack], Step]
    layout: Layout = field(default_factory=Layout)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    warm: int = 1


def backward(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """The gradients of the weights."""
    for weight in model.parameters():
        weight.grad = None
    loss.backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def gpt(**options: Any) -> nn.Module:
    return testing.build_gpt(**{"num_layers": 1, "mtp_num_layers": None, **options}).cuda()


def of_row(tokens: int = 32, **options: Any) -> Callable[[contextlib.ExitStack], Step]:
    """One row, [1, s]."""

    def build(undo: contextlib.ExitStack) -> Step:
        model = gpt(**options)
        if options.get("num_moe_experts"):
            undo.enter_context(without_te_in_experts())
        ids = torch.arange(tokens, device="cuda")[None] % VOCABULARY
        return lambda: backward(model, model(ids, ids, None, labels=ids).mean())

    return build


def of_packed(padded: bool = False, lora: bool = False, **options: Any) -> Callable[[contextlib.ExitStack], Step]:
    """A packed row, whose sequences are padded or not."""

    def build(undo: contextlib.ExitStack) -> Step:
        model = gpt(**options)
        if lora:
            testing.add_lora(model)
            model.cuda()
        lengths = LENGTHS if padded else tuple(-(-length // ALIGN) * ALIGN for length in LENGTHS)
        row = testing.pack(testing.random_sequences(lengths, VOCABULARY), align=ALIGN)
        given = packed_inputs(row)

        def step() -> list[Tensor]:
            losses = model(attention_mask=None, **given)
            return backward(model, (losses * given["loss_mask"]).sum() / row.total)

        return step

    return build


def onto_device(packed: Any) -> None:
    """Move the offsets of packed rows. As in trainers, one tensor holds those of queries and of keys."""
    for name, value in vars(packed).items():
        if isinstance(value, Tensor):
            setattr(packed, name, value.cuda())
    for name in ("cu_seqlens_kv", "cu_seqlens_kv_padded"):
        if getattr(packed, name, None) is not None:
            setattr(packed, name, getattr(packed, name.replace("kv", "q")))


def packed_inputs(row: testing.PackedRow) -> dict[str, Any]:
    """On this context-parallel rank, on the device; offsets too."""
    places = torch.cat([mrope.own(end - start, start) for (start, _), end in zip(row.spans, row.ends)])
    names = ("input_ids", "position_ids", "labels", "loss_mask")
    packed = row.packed_seq_params()
    onto_device(packed)
    return {**{name: getattr(row, name)[:, places].cuda() for name in names}, "packed_seq_params": packed}


def of_mla(undo: contextlib.ExitStack) -> Step:
    """A layer of multi-latent attention on a packed row."""
    module = undo.enter_context(_proof_mla.without_te())
    layer = _proof_mla.build(module).cuda()
    packed = mrope.packed_of(EQUAL)
    onto_device(packed)
    hidden = torch.randn(sum(EQUAL), 1, _proof_mla.HIDDEN).cuda().requires_grad_()
    return lambda: backward(layer, layer(hidden, None, packed_seq_params=packed)[0].square().sum())


def of_mrope(undo: contextlib.ExitStack) -> Step:
    """A packed row with positions in three dimensions."""
    model = mrope.build().cuda()
    ids, labels, places = (tensor.cuda() for tensor in mrope.row_of(EQUAL))
    packed = mrope.packed_of(EQUAL)
    onto_device(packed)
    return lambda: backward(model, model(ids, places, None, labels=labels, packed_seq_params=packed).mean())


def without_te_in_experts() -> Any:
    """0.16 looks up a name in each step that it has with Transformer Engine only."""
    from megatron.core.transformer.moe import moe_utils

    return mock.patch.object(moe_utils, "te_general_gemm", None, create=True)


def of_replay(undo: contextlib.ExitStack) -> Step:
    """A pass without gradients and a recomputed one, both with given experts."""
    undo.enter_context(router_replay.alone())
    module = router_replay.replay_module()
    model = testing.build_gpt(**router_replay.MODEL, **router_replay.FULL).cuda()
    given = [each.cuda() for each in router_replay.experts(1)]
    row, positions = router_replay.row().cuda(), torch.arange(router_replay.TOKENS)[None].cuda()

    def step() -> list[Tensor]:
        router_replay.replay(given)
        with torch.no_grad():
            model(row, positions, None, labels=row)
        router_replay.replay(given)
        loss = model(row, positions, None, labels=row).mean()
        module.RouterReplay.set_global_router_replay_action(module.RouterReplayAction.REPLAY_BACKWARD)
        return backward(model, loss)

    return step


def of_capacity(stash: bool) -> Callable[[contextlib.ExitStack], Step]:
    """Experts with buffers of a fixed capacity, and the end of the step."""

    def build(undo: contextlib.ExitStack) -> Step:
        from megatron.core.distributed import finalize_model_grads

        undo.enter_context(without_te_in_experts())
        model = testing.build_gpt(**paged_stash.MODEL).cuda()
        model.finish_grad_sync = lambda **options: None  # as of a model without replicas
        if stash:
            undo.enter_context(paged_stash.flags([model], page_size=4, buffer_size_factor_cuda=1.1))
        ids = (torch.arange(2 * paged_stash.TOKENS, device="cuda") * 7 % VOCABULARY).view(2, -1)
        positions = torch.arange(paged_stash.TOKENS, device="cuda").expand(2, -1)

        def step() -> list[Tensor]:
            gradients = backward(model, model(ids, positions, None, labels=ids).mean())
            finalize_model_grads([model])
            return gradients

        return step

    return build


FEW = 8  # tokens, where kernels are interpreted row by row
MTP = {"mtp_num_layers": 1}
SP = Layout(tp=2, sequence_parallel=True)
CP = Layout(cp=2)
FUSE = {"fused-linear-logprob": {"fuse": True}}
STEPS: Mapping[str, DeviceStep] = {
    "dense": DeviceStep(of_row()),
    "packed": DeviceStep(of_packed()),
    "MTP": DeviceStep(of_row(**MTP)),
    "MTP, packed": DeviceStep(of_packed(**MTP)),
    "MTP, packed and padded": DeviceStep(of_packed(padded=True, **MTP)),
    "recompute": DeviceStep(of_row(**FULL, **MTP)),
    "recompute, packed": DeviceStep(of_packed(**FULL, **MTP)),
    "LoRA, recompute": DeviceStep(of_packed(lora=True, **FULL)),
    "MLA, packed": DeviceStep(of_mla),
    "mrope, packed": DeviceStep(of_mrope),
    "experts": DeviceStep(of_row(**EXPERTS)),
    "experts, replay": DeviceStep(of_replay),
    "experts, capacity": DeviceStep(of_capacity(stash=False)),
    "experts, stash": DeviceStep(of_capacity(stash=True), warm=2),  # which learns its size in the first
    "fused linear": DeviceStep(of_row(FEW, **MTP, vocab_size=512), options=FUSE),
    "TP 2, SP": DeviceStep(of_row(FEW, sequence_parallel=True, **MTP), SP),
    "CP 2, packed": DeviceStep(of_packed(), CP),
    "CP 2, MTP, packed and padded": DeviceStep(of_packed(padded=True, **MTP), CP),
}


# Counts


@dataclass
class Run:
    """The counts of a step on this rank, or the error that it raises."""

    counts: pretend_cuda.Counts | str

    @property
    def error(self) -> str:
        return self.counts if isinstance(self.counts, str) else ""


@contextlib.contextmanager
def warmed(
    step: str | DeviceStep, ids: Sequence[str], device: Callable[[], Any] = pretend_cuda.cuda_pretended
) -> Iterator[Step]:
    """A step, or that of this name, under these patches, with the options that it needs, that has run as often as it
    must.

    device: enters the pretended device; `contextlib.nullcontext` on a real one.
    """
    step = STEPS[step] if isinstance(step, str) else step
    with contextlib.ExitStack() as undo:
        undo.enter_context(device())
        if ids:
            options = {id: dict(given) for id, given in step.options.items() if id in ids}
            undo.enter_context(shim.patched(only=list(ids), require=list(ids), options=options))
        undo.enter_context(torch_norm_under_sequence_parallelism())
        undo.enter_context(storage_shared_in_python())
        undo.enter_context(testing.layout_initialised(step.layout))
        torch.manual_seed(0)
        run = step.build(undo)
        for _ in range(step.warm):
            run()
        yield run


def run_counted(name: str, ids: Sequence[str] = ()) -> Run:
    """A step of which what a model makes once is no part."""
    try:
        with warmed(name, ids) as run, pretend_cuda.counted() as counts:
            run()
    except shim.ShimError as error:
        if not isinstance(error, CannotRunError):
            raise
        return Run(f"cannot run: {error}")
    except Exception as error:  # what stock cannot do has no counts
        return Run(f"{type(error).__name__}: {error}".splitlines()[0][:200])
    return Run(counts)


def replayed(name: str, ids: Sequence[str]) -> tuple[int, int]:
    """Under these patches, a step captured into a graph: (gradients that it has, those that a replay gets wrong)."""
    with warmed(name, ids) as run:
        right = [pretend_cuda.values_of(gradient) for gradient in run()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gradients = run()
        for gradient in gradients:
            gradient.fill_(float("nan"))
        graph.replay()
        found = [pretend_cuda.values_of(gradient) for gradient in gradients]
        return len(right), sum(not torch.equal(one, other) for one, other in zip(found, right))


def each_counted(name: str, ids: Sequence[str]) -> dict[str, Run]:
    """The same with each of these patches alone."""
    return {id: run_counted(name, [id]) for id in ids}


def at_work(run: Run, ids: Sequence[str]) -> list[str]:
    """The patches that may have asked something of the device: theirs is the place of an event, or they use the
    shim.ops of one."""
    if run.error:
        return []
    counters = (run.counts.host_reads, run.counts.blocking_copies, run.counts.launches)
    places = {event.place.partition(":")[0] for counter in counters for event in counter}
    of_ops = any(place.startswith("shim/ops/") for place in places)
    return [id for id in ids if places & files_of(id) or (of_ops and "shim.ops" in source_of(id))]


def source_of(id: str) -> str:
    return "".join((PATCHES.parent / file.removeprefix("shim/")).read_text("utf-8") for file in files_of(id))


@functools.cache
def files_of(id: str) -> frozenset[str]:
    """Those of a patch, below the top: of its folder but proofs, and the shared helpers that they import."""
    folder = next(found for found in PATCHES.glob("*/" + id.replace("-", "_")))
    waiting = [file for file in folder.glob("*.py") if "proof" not in file.name]
    found: set[Path] = set()
    while waiting:
        file = waiting.pop()
        found.add(file)
        helpers = re.findall(r"^(?:from|import) .*\b(_[a-z_]+)\b", file.read_text("utf-8"), re.MULTILINE)
        beside = {folder.parent / f"{helper}.py" for helper in helpers}
        waiting += [helper for helper in beside if helper.exists() and helper not in found]
    return frozenset(f"shim/{file.relative_to(PATCHES.parent).as_posix()}" for file in found)
