"""A model that a user builds, made ready for a proof: built for a layout, seeded, and trained for a step."""

from __future__ import annotations

import contextlib
import inspect
import re
import traceback
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .model import run_mtp_on_labels
from .oracle import Result, run_alone, run_packed
from .packing import PackedRow
from .proof import CannotRunError

__all__ = [
    "MODEL_ERROR",
    "Build",
    "ModelError",
    "alone",
    "built",
    "copy_weights",
    "line_of",
    "moved",
    "packed",
    "unlike",
    "vocabulary",
]

MODEL_ERROR = "ModelError: "  # the `crashes` of a proof

ON_CPU = (
    "On a CPU build the model with megatron's local layers, and with shim.testing.CPUCoreAttention as the "
    "core_attention of its attention layers (spec.submodules.self_attention.submodules.core_attention), because those "
    "of Transformer Engine need a GPU, and megatron's own takes no packed rows"
)
NO_KERNEL = "Transformer Engine has no attention for packed rows in float32; let build() make a model in bf16"
TAKES = "let it take **overrides and pass them on to TransformerConfig"


class ModelError(Exception):
    """The user's model raised in the run that a proof is about, after it went through the run that is the truth."""


class Build:
    """The user's function. It may be a closure: a forked rank finds it by its number, without unpickling it."""

    _all: ClassVar[list[Build]] = []

    def __init__(self, function: Callable[..., Any], number: int) -> None:
        self.function, self.number = function, number

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Build:
        cls._all.append(cls(function, len(cls._all)))
        return cls._all[-1]

    @classmethod
    def numbered(cls, number: int) -> Build:
        return cls._all[number]

    def __reduce__(self) -> tuple[Any, ...]:
        return Build.numbered, (self.number,)

    def call(self, overrides: dict[str, Any]) -> Any:
        """function(**overrides), with those only that it takes."""
        taken = inspect.signature(self.function).parameters
        whole = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        return self.function(**{name: value for name, value in overrides.items() if whole or name in taken})


# ---- building


def built(build: Build, device: str, *, seed: int = 1, float32: bool = False, **overrides: Any) -> Any:
    """The language model that the user's function builds for the initialised layout, ready to be trained.

    overrides: fields of the config beyond the layout's. float32: with weights of that type, also on a GPU; on a
    CPU it always has them, because the rounding of others hides what is measured.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    ranks = parallel_state.get_tensor_model_parallel_world_size()
    layout: dict[str, Any] = {
        "tensor_model_parallel_size": ranks,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
    }
    if ranks == 1:
        layout["sequence_parallel"] = False
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    try:
        made = build.call({**layout, **overrides})
    except Exception as error:
        raise _cannot(error, "build() raised", device) from error
    model = _language_model(made).train()
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        found = getattr(model.config, name)
        if found != layout[name]:
            raise CannotRunError(f"build() made a model with {name}={found}, not {layout[name]}: {TAKES}")
    if device == "cuda":
        model.cuda()
    if float32 or device == "cpu":
        _in_float32(model)
    _set(model, {name: value for name, value in overrides.items() if name.startswith("recompute_")})
    _without_noise(model)
    _stir(model, seed)
    run_mtp_on_labels(model)
    model.register_forward_hook(_give_losses, with_kwargs=True)
    return model


def _language_model(made: Any) -> Any:
    """The model of megatron-core in the result of the user's function: that itself, or a module in it."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    chunks = [made] if isinstance(made, nn.Module) else list(made)
    if len(chunks) != 1:
        raise CannotRunError(f"build() returned {len(chunks)} models for one pipeline stage: {TAKES}")
    if type(chunks[0]).__name__.endswith("DistributedDataParallel"):
        raise CannotRunError("build() returned a model wrapped for data parallelism: let it return the model itself")
    found = [module for module in chunks[0].modules() if isinstance(module, LanguageModule)]
    if not found:
        raise CannotRunError(
            f"build() returned a {type(chunks[0]).__qualname__} without a LanguageModule of megatron-core (GPTModel, "
            "for example), and the proofs need its compute_language_model_loss"
        )
    return found[0]


def _configs(model: nn.Module) -> list[Any]:
    """Every config of any module, each once. Some are copies of others."""
    return list({id(module.config): module.config for module in model.modules() if hasattr(module, "config")}.values())


def _set(model: nn.Module, values: dict[str, Any]) -> None:
    """Set fields of all configs that have them."""
    for config in _configs(model):
        for name, value in values.items():
            if hasattr(config, name) and getattr(config, name) != value:
                setattr(config, name, value)


def _in_float32(model: nn.Module) -> None:
    if all(weight.dtype in (torch.float32, torch.float64) for weight in model.parameters()):
        return
    model.float()
    _set(model, {"params_dtype": torch.float32, "pipeline_dtype": torch.float32, "bf16": False, "fp16": False})


def _without_noise(model: nn.Module) -> None:
    """Switch off random effects, and losses that are not of a token."""
    _set(model, {"hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None})
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "hidden_dropout", None), float):
            module.hidden_dropout = 0.0  # type: ignore[assignment]


@torch.no_grad()
def _stir(model: nn.Module, seed: int) -> None:
    """Move each weight a little that is the same everywhere: LoRA's factor of zeros keeps gradients from the other."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.numel() and bool((weight == weight.flatten()[0]).all()):
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator).to(weight))


@torch.no_grad()
def unlike(model: nn.Module) -> None:
    """Change every weight, so that a checkpoint that leaves one out is noticed."""
    for weight in model.parameters():
        weight.add_(1)


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Give the second model the weights and buffers of the first."""
    theirs = {**dict(target.named_parameters()), **dict(target.named_buffers())}
    ours = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    if theirs.keys() != ours.keys():
        raise CannotRunError("build() makes other weights with recompute than without, so they cannot be compared")
    for name, value in ours.items():
        theirs[name].copy_(value)


def _give_losses(model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook: the losses per token of a model that returns logits [b, s, V] though it was given labels."""
    if isinstance(output, Tensor) and output.dim() == 3 and kwargs.get("labels") is not None:
        return model.compute_language_model_loss(kwargs["labels"], output.transpose(0, 1).contiguous())
    return None


def vocabulary(model: Any) -> int:
    """How many tokens the model knows, at least."""
    from megatron.core import parallel_state

    size = getattr(model, "vocab_size", None)
    if isinstance(size, int):
        return size
    rows = model.embedding.word_embeddings.weight.shape[0]
    return int(rows * parallel_state.get_tensor_model_parallel_world_size())


def moved(row: PackedRow, device: str) -> PackedRow:
    """The row with its tensors on this device."""
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    there: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
    return replace(row, **there)


# ---- a step


def alone(model: Any, row: PackedRow, doing: str = "") -> Result:
    """`run_alone`. doing: the purpose of this run, if it is not the truth."""
    return _step(run_alone, model, row, doing, "the model does not train on an unpacked sequence")


def packed(model: Any, row: PackedRow, doing: str = "on a packed row", is_truth: bool = False) -> Result:
    """`run_packed`. is_truth: without it the proof has no truth, so an error means that it cannot run."""
    return _step(run_packed, model, row, "" if is_truth else doing, "the model does not train on a packed row")


def _step(run: Callable[..., Result], model: Any, row: PackedRow, doing: str, cannot: str) -> Result:
    device = str(next(model.parameters()).device.type)
    taken = inspect.signature(model.forward).parameters
    masks = "loss_mask" in taken or any(one.kind is one.VAR_KEYWORD for one in taken.values())
    try:
        with torch.device(device) if device != "cpu" else contextlib.nullcontext():
            try:
                found = run(model, row, loss_mask=masks)
            except RuntimeError as error:
                if "bitwise" not in str(error):
                    raise
                # mcore-bridge's loss takes no masks of floats.
                model.register_forward_pre_hook(_with_boolean_mask, with_kwargs=True)
                found = run(model, row, loss_mask=masks)
        return _on_cpu(found)
    except CannotRunError:
        raise
    except Exception as error:
        if "No dot product attention" in str(error) and next(model.parameters()).dtype == torch.float32:
            raise CannotRunError(f"{line_of(error)}: {NO_KERNEL}") from error
        if not doing or _for_want_of_a_gpu(error, device):
            raise _cannot(error, f"the model does not train {doing}:" if doing else f"{cannot}:", device) from error
        raise ModelError(f"{doing}, {line_of(error)}") from error


def _on_cpu(found: Result) -> Result:
    grads = {name: grad.cpu() for name, grad in found.grads.items()}
    return Result(found.main.cpu(), [loss.cpu() for loss in found.mtp], found.logged.cpu(), grads)


def _with_boolean_mask(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    if kwargs.get("loss_mask") is not None:
        kwargs["loss_mask"] = kwargs["loss_mask"].bool()
    return args, kwargs


# ---- errors


def line_of(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _cannot(error: Exception, what: str, device: str) -> CannotRunError:
    hint = f". {ON_CPU}" if _for_want_of_a_gpu(error, device) else ""
    return CannotRunError(f"{what} {line_of(error)}{hint}")


_ATTENTION = ("dot_product_attention.py", "transformer_engine", "flash_attn")
_INNERMOST = 4  # frames: of a kernel's Python function, its module's forward, and megatron's module around that


def _for_want_of_a_gpu(error: Exception, device: str) -> bool:
    """Whether a model on a CPU raised because its attention or a kernel needs a GPU."""
    if device != "cpu":
        return False
    frames = traceback.extract_tb(error.__traceback__)[-_INNERMOST:]
    inside = any(part in frame.filename for frame in frames for part in _ATTENTION)
    return (
        inside or re.search(r"\b(CUDA|GPU|NVIDIA|Apex|apex|fused_weight_gradient_mlp_cuda)\b", str(error)) is not None
    )
