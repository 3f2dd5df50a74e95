"""Generic proofs: rules that hold for any model of megatron-core, measured on a model that a user builds.

    def build(**overrides):                     # my_module.py; importing it may apply the trainer's own patches
        config = TransformerConfig(**{**my_fields, **overrides})
        return GPTModel(config, my_spec, ...)

    for found in generic_proofs(build):
        print(found.name, measure(found, Here(world=found.ranks)).text)

`shim prove --model my_module:build` runs them on stock and with the patches. The model should be small: it is built and
trained several times. On a CPU its layers are those of megatron's local spec, and its core attention is
`CPUCoreAttention`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from . import user_model
from .layout import Layout
from .oracle import Result, differences, worst
from .packing import PackedRow, pack, random_sequences
from .proof import CannotRunError, Here, Measured, Proof, proof
from .sharded import difference_of_shards, load, save, shards_of
from .user_model import MODEL_ERROR, Build, alone, built, copy_weights, packed

__all__ = ["generic_proofs", "overrides_of"]

LENGTHS, ALIGN = (5, 7, 4), 8
EXACT, OF_RANKS = 1e-6, 5e-6  # of fp32 on a CPU, of a small model; if more is found, the effect of rounding is measured
# The runs that measure it, the allowed multiple of it, and the limit.
# The smallest defect of this kind that is known moves gradients by 5e-2.
SEEDS, MARGIN, HIDES = (1, 2), 2.0, 3e-2
Run = Callable[[nn.Module, PackedRow], Result]
NONE: dict[str, Any] = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OF_MODULES = {**NONE, "recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
AS_BUILT: dict[str, Any] = {}


def generic_proofs(build: Callable[..., Any]) -> list[Proof]:
    """The proofs on the model that `build` makes.

    build: called as build(**overrides) inside an initialised layout, in a process or rank that may have no GPU. Returns
        a model in training mode, or a list with one. The overrides are fields of TransformerConfig that it passes on:
        recompute_*, the sizes of parallelism, sequence_parallel. A field that it does not take by name (or by
        **overrides) is set on the config of the built model if megatron-core reads it at run time, such as recompute_*.

    Dropout and the auxiliary losses of experts are off while a proof runs. Weights that are the same everywhere, such
    as a LoRA factor of zeros, are moved a little, so that everything gets a gradient.
    """
    mine = Build.of(build)

    @proof("packed off by {:.1e}", bound=EXACT, devices=("cpu", "cuda"), crashes=MODEL_ERROR)
    def packed_equals_alone(here: Here) -> Measured:
        """A packed row gives other losses or gradients than its sequences alone.

        To reproduce: pack three sequences, each padded to a multiple of 8, into one THD row with cu_seqlens and
        cu_seqlens_padded, and train one step. Run each sequence alone and unpacked, put its losses per token into the
        row, and take the loss over the row as the release does. Compare the losses per token of the model and of its
        multi-token prediction, and all gradients, in float32. The bound is 1e-6, or how far the losses and gradients
        of the sequences alone move if each weight is rounded once more: wide models round more. On a GPU packed rows
        have no kernel for float32 (Transformer Engine), so there the model keeps its dtype.
        """
        [measured] = here.run(_packed_against_alone, mine, here.device)
        return measured

    @proof("recomputed off by {:.1e}", right="bit-equal", devices=("cpu", "cuda"), crashes=MODEL_ERROR)
    def recompute_equals_none(here: Here) -> Measured:
        """Full activation recompute gives other losses or gradients than no recompute.

        To reproduce: train one step with recompute_granularity="full", recompute_method="uniform" and
        recompute_num_layers=1, and the same step with the same weights without recompute. They are to be equal to the
        bit. Weights that the model has frozen stay frozen. Gradients may be off by rounding if autograd adds up the
        same ones in another order: those of a tensor that what is recomputed uses several times, and others as well.
        """
        [measured] = here.run(_recompute_against_none, mine, False, here.device)
        return measured

    @proof("recomputed off by {:.1e}", right="bit-equal", devices=("cpu", "cuda"), crashes=MODEL_ERROR)
    def packed_recompute_equals_none(here: Here) -> Measured:
        """Full activation recompute of a packed row gives other losses or gradients than no recompute.

        To reproduce: as without packing, with one THD row of padded sequences.
        """
        [measured] = here.run(_recompute_against_none, mine, True, here.device)
        return measured

    @proof(
        "{:.0f} layers not recomputed",
        right="every layer recomputed",
        defect="memory",
        devices=("cpu", "cuda"),
        crashes=MODEL_ERROR,
    )
    def recompute_reaches_every_layer(here: Here) -> float:
        """Full activation recompute leaves layers out, whose activations stay in memory.

        To reproduce: count how often the forward of each TransformerLayer runs in a step, those of multi-token
        prediction included. Under recompute_granularity="full" each is to run twice as often as without recompute.
        """
        return _here(here, _layers_left_out, mine)

    @proof("gradients off by {:.1e}", bound=EXACT, devices=("cpu", "cuda"), crashes=MODEL_ERROR)
    def trained_beside_frozen_weights(here: Here) -> Measured:
        """A parameter that is trained beside frozen ones gets another gradient than if all are trained, or none.

        To reproduce: train one step with the parameters frozen that build() has frozen, and the same step with none
        frozen, and compare the gradients of those that are trained in both. One that is missing counts as zero. If
        build() has frozen nothing, all but vectors are frozen, as in training of biases and norms alone. The bound is
        1e-6, or how far these gradients move if each weight is rounded once more.
        """
        [measured] = here.run(_frozen_against_all_trained, mine, here.device)
        return measured

    @proof(
        "{:.0f} parameters are no leaves, or get their gradient in parts or not at all",
        right="each gradient arrives once",
        devices=("cpu", "cuda"),
        crashes=MODEL_ERROR,
    )
    def each_gradient_arrives_once(here: Here) -> float:
        """Recompute makes a parameter a result of the model, or brings its gradient in several parts or not at all.

        To reproduce: train one step on one sequence, with the recompute that the model is built with, with
        recompute_granularity="full", and with recompute_modules=["core_attn", "mlp"]. After forward each parameter is
        to be a leaf of autograd, and to require a gradient if it did before. One that a recomputed function returned is
        none, and backward may call itself without end, so the proof goes no further then. In backward each parameter
        that gets a gradient without recompute is to get it once: DistributedDataParallel adds up ranks as soon as
        a gradient has arrived, and what arrives later is lost.
        """
        return _here(here, _gradients_astray, mine)

    @proof("TP off by {:.1e}", bound=OF_RANKS, ranks=2, crashes=MODEL_ERROR)
    def tensor_parallel_equals_one_rank(here: Here) -> Measured:
        """Tensor parallelism gives other losses or gradients than one rank with the same weights.

        To reproduce: save the model on one rank by sharded_state_dict and dist_checkpointing, load it on two
        tensor-parallel ranks, and train one step on both with the same unpacked sequences. Compare the losses of each
        rank, and its part of each gradient with the same part of the whole one, over the norm of all gradients. The
        bound is 5e-6, or how far those of one rank move if each weight is rounded once more.
        """
        return _tensor_parallel_against_one(here, mine)

    @proof(
        "{:.0f} tensors differ after loading", right="all tensors equal", devices=("cpu", "cuda"), crashes=MODEL_ERROR
    )
    def save_and_load(here: Here) -> float:
        """A model that was saved and loaded again has other weights.

        To reproduce: save model.sharded_state_dict() with dist_checkpointing.save, load it into a model with other
        weights by dist_checkpointing.load and load_state_dict, and compare all parameters and buffers to the bit.
        """
        return _here(here, _tensors_that_differ, mine)

    return [
        packed_equals_alone,
        recompute_equals_none,
        packed_recompute_equals_none,
        recompute_reaches_every_layer,
        trained_beside_frozen_weights,
        each_gradient_arrives_once,
        tensor_parallel_equals_one_rank,
        save_and_load,
    ]


def _here(here: Here, function: Callable[..., float], *args: Any) -> float:
    """function(*args, device) in a layout of one rank."""
    [measured] = here.run(function, *args, here.device)
    return float(measured)


def _row(model: nn.Module, device: str, align: int = ALIGN) -> PackedRow:
    return user_model.moved(pack(random_sequences(LENGTHS, user_model.vocabulary(model)), align=align), device)


def _packed_against_alone(build: Build, device: str) -> Measured:
    model = built(build, device)
    row = _row(model, device)
    truth = alone(model, row)
    _has_gradients(truth)
    found = differences(packed(model, row), truth)
    if worst(found) <= EXACT:
        return Measured(worst(found))
    return _beside_rounding(found, _rounding(alone, model, row, truth))


def _beside_rounding(found: dict[str, float], bounds: dict[str, float]) -> Measured:
    """The difference that is largest beside what rounding may move. CannotRunError if that would hide a defect."""
    most = max(found, key=lambda of: found[of] / bounds[of] if found[of] == found[of] else math.inf)
    if found[most] <= bounds[most] and worst(bounds) > HIDES:
        raise CannotRunError(
            f"rounding may move losses or gradients here by {worst(bounds):.1e}, and no more was found, but that would "
            "hide a defect as well: run on a CPU, with the model in float32 and weights as at the beginning of training"
        )
    return Measured(found[most], bound=bounds[most])


def _rounding(run: Run, model: nn.Module, row: PackedRow, truth: Result) -> dict[str, float]:
    """What rounding may move here, by how far the truth moves if each weight moves up or down by its last bit."""
    held = [(weight, weight.detach().clone()) for weight in model.parameters() if weight.is_floating_point()]
    found = []
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight, value in held:
                up = torch.randint(0, 2, weight.shape, generator=generator).to(weight) * 2 - 1
                weight.copy_(value * (1 + up * torch.finfo(weight.dtype).eps))
        try:
            found.append(differences(run(model, row), truth))
        finally:
            with torch.no_grad():
                for weight, value in held:
                    weight.copy_(value)
    return {of: max(EXACT, *(MARGIN * each[of] for each in found)) for of in found[0]}


def _has_gradients(truth: Result) -> None:
    if not truth.grads:
        raise CannotRunError("no weight of the model gets a gradient from a sequence alone: nothing is trained")


def _recompute_against_none(build: Build, is_packed: bool, device: str) -> Measured:
    plain, recomputed = _plain_and_recomputed(build, device)
    row = _row(plain, device)
    of_truth: Run = functools.partial(packed, is_truth=True) if is_packed else alone
    truth, again = (of_truth(plain, row) for _ in range(2))
    _has_gradients(truth)
    if worst(differences(again, truth)) != 0:
        raise CannotRunError(
            "two runs without recompute differ already, so equal bits cannot be asked for; on a GPU set "
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 and deterministic_mode"
        )
    run = functools.partial(packed if is_packed else alone, row=row, doing="with full recompute")
    found = run(recomputed)
    off = differences(found, truth)
    if worst(off) == 0 or worst({**off, "grad": 0.0}) != 0:
        return Measured(worst(off))
    with _in_the_order_of_a_recompute():
        in_order = run(recomputed)
    if worst(differences(found, in_order)) != 0:
        return Measured(off["grad"])
    # To the bit it is the same sum in another order.
    bounds = _rounding(of_truth, plain, row, truth)
    return _beside_rounding({"grad": off["grad"]}, {"grad": bounds["grad"]})


@contextlib.contextmanager
def _in_the_order_of_a_recompute() -> Iterator[None]:
    """Inside, tensor_parallel.checkpoint recomputes nothing, and gradients are added up as if it did.

    A recompute adds up the gradients of its argument from all uses inside, and autograd adds those from outside.
    Without it autograd adds up all at once: (a + b) + c in place of a + (b + c). A view as the argument does as well.
    """
    from megatron.core.tensor_parallel import random

    def once(function: Callable[..., Any], distribute: bool, *args: Any) -> Any:
        return function(*(arg.view_as(arg) if isinstance(arg, Tensor) else arg for arg in args))

    with mock.patch.object(random.CheckpointFunction, "apply", once):
        yield


def _plain_and_recomputed(build: Build, device: str) -> tuple[nn.Module, nn.Module]:
    """Two models with the same weights, the second under full recompute."""
    plain, recomputed = (built(build, device, **options) for options in (NONE, FULL))
    copy_weights(plain, recomputed)
    return plain, recomputed


def _layers_left_out(build: Build, device: str) -> float:
    plain, recomputed = _plain_and_recomputed(build, device)
    row = _row(plain, device)
    once = _layer_calls(plain, lambda: alone(plain, row))
    again = _layer_calls(recomputed, lambda: alone(recomputed, row, doing="with full recompute"))
    if not once:
        raise CannotRunError("the model has no TransformerLayer, and only those are counted")
    return float(sum(again.get(name, 0) < 2 * calls for name, calls in once.items()))


def _layer_calls(model: nn.Module, run: Callable[[], Any]) -> dict[str, int]:
    """How often the forward of each layer of the model runs in run(), by its name.

    Runs it once before, because the first step of a model may be tried twice.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    run()
    calls: dict[str, int] = {}

    def counting(name: str) -> Callable[..., None]:
        def count(module: nn.Module, args: Any) -> None:
            calls[name] = calls.get(name, 0) + 1

        return count

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, TransformerLayer)]
    handles = [module.register_forward_pre_hook(counting(name)) for name, module in layers]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


# ---- frozen weights


def _frozen_against_all_trained(build: Build, device: str) -> Measured:
    model = built(build, device)
    row = _row(model, device)
    parameters = {name: weight for name, weight in model.named_parameters() if weight.is_floating_point()}
    trained = {name for name, weight in parameters.items() if weight.requires_grad}
    if len(trained) == len(parameters):
        trained = {name for name, weight in parameters.items() if weight.dim() == 1}

    def step(names: Collection[str], doing: str = "") -> Result:
        for name, weight in parameters.items():
            weight.requires_grad_(name in names)
        found = alone(model, row, doing=doing)
        return replace(found, grads={name: grad for name, grad in found.grads.items() if name in trained})

    truth = step(parameters)
    _has_gradients(truth)
    found = differences(step(trained, doing="with frozen weights"), truth)
    if worst(found) <= EXACT:
        return Measured(worst(found))

    def all_trained(model: nn.Module, row: PackedRow) -> Result:
        return step(parameters)

    return _beside_rounding(found, _rounding(all_trained, model, row, truth))


# ---- each gradient once


class _LostError(CannotRunError):
    """Ends a step after a forward that made parameters its results. `names` has them."""

    def __init__(self, names: set[str]) -> None:
        super().__init__(f"after forward these are no leaves, or require another gradient than before: {sorted(names)}")
        self.names = names


def _gradients_astray(build: Build, device: str) -> float:
    plain = built(build, device, **NONE)
    row = user_model.moved(pack(random_sequences(LENGTHS[:1], user_model.vocabulary(plain)), align=ALIGN), device)
    try:
        truth = _arrivals(plain, row, "")
    except _LostError as lost:
        return float(len(lost.names))
    if not truth:
        raise CannotRunError("no weight of the model gets a gradient from a sequence alone: nothing is trained")
    astray = {name for name, times in truth.items() if times != 1}
    for options in (AS_BUILT, FULL, OF_MODULES):
        recomputed = built(build, device, **options)
        copy_weights(plain, recomputed)
        try:
            found = _arrivals(recomputed, row, "with recompute")
            astray |= {name for name in truth.keys() | found.keys() if found.get(name) != 1}
        except _LostError as lost:
            astray |= lost.names
    return float(len(astray))


def _arrivals(model: nn.Module, row: PackedRow, doing: str) -> dict[str, int]:
    """How often the gradient of each parameter arrives in one step, by its name. Raises _LostError after forward."""
    weights = dict(model.named_parameters())
    trained = {name for name, weight in weights.items() if weight.requires_grad}
    arrived: dict[str, int] = {}

    def look(*_: Any) -> None:
        lost = {name for name, weight in weights.items() if not weight.is_leaf}
        lost |= {name for name, weight in weights.items() if weight.requires_grad is not (name in trained)}
        if lost:
            raise _LostError(lost)

    def counting(name: str) -> Callable[[Tensor], None]:
        def count(weight: Tensor) -> None:
            arrived[name] = arrived.get(name, 0) + 1

        return count

    handles = [model.register_forward_hook(look)]
    handles += [weights[name].register_post_accumulate_grad_hook(counting(name)) for name in trained]
    try:
        alone(model, row, doing)
    finally:
        for handle in handles:
            handle.remove()
    return arrived


# ---- tensor parallelism, checkpoints


def _tensor_parallel_against_one(here: Here, build: Build) -> Measured:
    with tempfile.TemporaryDirectory(prefix="shim-prove-") as directory:
        [(truth, shards, options)] = here.run(_on_one_rank, build, directory)
        layout = Layout(tp=here.world, sequence_parallel=bool(options))
        ranks = here.run(_on_a_tensor_parallel_rank, build, here.world, options, directory, layout=layout)
    losses = {f"losses of rank {rank}": worst(differences(result, truth)) for rank, (result, _) in enumerate(ranks)}
    off = worst({**losses, "gradients": difference_of_shards([found for _, found in ranks], shards)})
    if off <= OF_RANKS:
        return Measured(off)
    [rounding] = here.run(_rounding_on_one_rank, build)
    return _beside_rounding({"all": off}, {"all": max(OF_RANKS, rounding)})


def _rounding_on_one_rank(build: Build) -> float:
    model = built(build, "cpu", float32=True)
    row = _row(model, "cpu")
    return worst(_rounding(alone, model, row, alone(model, row)))


def _on_one_rank(build: Build, directory: str) -> Any:
    model = built(build, "cpu", float32=True)
    result = alone(model, _row(model, "cpu"))
    _has_gradients(result)
    save(model, directory)
    # megatron-core does not train experts under tensor parallelism alone.
    options = {"sequence_parallel": True} if model.config.num_moe_experts else {}
    return _without_gradients(result), shards_of(model, result.grads), options


def _on_a_tensor_parallel_rank(build: Build, ranks: int, options: dict[str, Any], directory: str) -> Any:
    model = built(build, "cpu", float32=True, **options)
    load(model, directory)
    result = alone(model, _row(model, "cpu"), doing=f"on {ranks} tensor-parallel ranks")
    return _without_gradients(result), shards_of(model, result.grads)


def _without_gradients(result: Result) -> Result:
    return Result(result.main, result.mtp, result.logged, {})


def _tensors_that_differ(build: Build, device: str) -> float:
    model, fresh = (built(build, device, seed=seed) for seed in (1, 2))
    user_model.unlike(fresh)
    with tempfile.TemporaryDirectory(prefix="shim-prove-") as directory:
        save(model, directory)
        load(fresh, directory)
    saved, loaded = (_tensors(found) for found in (model, fresh))
    return float(sum(name not in loaded or not _same(saved[name], loaded[name]) for name in saved))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and all buffers that a checkpoint has."""
    state = model.state_dict()
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    return {name: state[name] for name in names if isinstance(state.get(name), Tensor)}


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


# ---- what shim says of the overrides


def overrides_of(model: nn.Module | list[nn.Module]) -> list[dict[str, str]]:
    """The trainer's objects in place of functions that shim patches, with shim's verdict on each.

    Each has "patch" (id), "target" (module:function, "" if the report names none), "state" (of the patch: "applied"
    if the override leaves its effect or takes a part of it, which "reason" says, "inactive" if an option switches the
    patch off, "shadowed", "conflict", "unknown" if it cannot be told), "reason" (the object and its place, in words)
    and "remedy". Call it with shim applied, once the model is built. Without it the list has at most conflicts.
    """
    import shim

    try:
        report = shim.check(model)
    except shim.ShimError:  # a requirement is not met, or nothing is applied; the states say which
        report = shim.status()
    found = []
    for patch in (report[id] for id in report):
        if patch.state in ("shadowed", "conflict", "unknown"):
            hidden = [target for target, what in patch.targets.items() if what == patch.state]
            for target in hidden or [_named_in(patch.reason, patch.targets)]:
                found.append(_override(patch.id, target, patch.state, patch.reason, patch.remedy))
        for text in patch.others:  # a target that is lost or left to its override is told there too
            found.append(_override(patch.id, _named_in(text, patch.targets), patch.state, text, ""))
    return found


def _override(patch: str, target: str, state: str, reason: str, remedy: str) -> dict[str, str]:
    return {"patch": patch, "target": target, "state": state, "reason": reason, "remedy": remedy}


def _named_in(text: str, targets: Any) -> str:
    """The target that a text names: in full, else by the name of its function alone, if only one has it."""
    for target in targets:
        if target in text:
            return str(target)
    named = [target for target in targets if re.search(rf"\b{re.escape(target.rpartition('.')[2])}\b", text)]
    return str(named[0]) if len(named) == 1 else ""
