"""The losses of a model from hidden states and the output weight, without logits, as an option.

What is large (0.12 to 0.20): with labels, a model computes all logits, [s, b, V / TP], and the loss of each token from
them. Logits, their softmax and their gradient are the largest tensors of a step. Multi-token prediction (MTP) makes
them once more at each depth.

The patch does nothing until the option `fuse` is true. Then a call with labels returns the same losses, [b, s], from
shim.ops.linear_token_logprobs, for the main model and for MTP. Logits exist one tile at a time, in forward and again in
backward.
- The model computes its loss on a view of itself. The view's output layer returns a promise of logits, and
  compute_language_model_loss takes promises. Whatever else touches a promise gets the logits themselves, or an error
  where their gradient would be lost.
- What ColumnParallelLinear does around its product stays: sums over tensor-parallel ranks, the gather of
  sequence-parallel shards, the sum in main_grad of gradient_accumulation_fusion (of a gradient in the weight's dtype).
  A frozen weight gets no gradient.
- Hooks before the output layer's forward run as before. They get a view of the layer.
- A negative label means no target: loss and gradient are zero, as with chunked-logprob.
- cross_entropy_loss_fusion changes nothing any more.

A model takes stock's way, and shim.check() says why, if
- its output layer is of another class, such as one with LoRA or in FP8, or has a bias, an adapter, or hooks that want
  its logits,
- it has a compute_language_model_loss of its own,
- the config has defer_embedding_wgrad_compute, GTP or config_logger_dir.
A call takes stock's way without labels, with an output_processor, and under torch.compile. It does so with a warning
under autocast, with gathered logits (runtime_gather_output), with logits in another dtype than the hidden states, and
under Megatron-FSDP with gradient_accumulation_fusion.

0.19 counts which predictions of MTP are right, for a log in training. The count needs the logits once more, some tokens
at a time.

Upstream: cross_entropy_fusion_impl="linear" on the dev branch, on Blackwell only. With it stock's way is taken.

Delete when the oldest supported release has such a loss on every device.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shim._errors import ShimError
from shim.patches._arguments import Function, argument, replacing
from shim.patches.megatron_core._linear_losses import Head, head_of, obstacle_of
from shim.patches.megatron_core.mtp_packed_sequences.refused_row import view_of

log = logging.getLogger("shim")

ID = "fused-linear-logprob"
GPT = "megatron.core.models.gpt.gpt_model:GPTModel."
MAMBA = "megatron.core.models.mamba.mamba_model:MambaModel.forward"
HYBRID = "megatron.core.models.hybrid.hybrid_model:HybridModel.forward"
COUNTS = "megatron.core.transformer.multi_token_prediction:_compute_mtp_acceptance_counts"
LANGUAGE = "megatron.core.models.common.language_module.language_module"


class _Chosen:
    """The options of the functions that hold it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.fuse: bool = options["fuse"]
        self.said: set[str] = set()

    def say(self, why: str) -> None:
        """Warn once of each reason why a call takes stock's way."""
        if why not in self.said:
            self.said.add(why)
            log.warning(f"{ID}: {why}, so a call makes its logits as a whole")


class Promise:
    """The logits of one call of an output layer, [s, b, V / TP], which nobody has computed yet."""

    def __init__(self, head: Head, scale: float = 1.0) -> None:
        self.head, self.scale, self.with_grad = head, scale, torch.is_grad_enabled()

    def __mul__(self, factor: Any) -> Any:
        if isinstance(factor, (int, float)) and factor > 0:  # muP's multiplier
            return Promise(self.head, self.scale * factor)
        return self.kept * factor

    __rmul__ = __mul__

    @functools.cached_property
    def kept(self) -> Tensor:
        """The logits themselves."""
        if torch.is_grad_enabled() != self.with_grad:
            # Such as inside of an autograd function, which would lose their gradient.
            raise ShimError(
                f"{ID}: something other than the model's loss takes the logits, and not where they are made. Leave the "
                "option `fuse` off for this model"
            )
        head = self.head
        logits, _ = head.layer.forward(head.hidden, weight=head.weight)
        found: Tensor = logits if self.scale == 1.0 else logits * self.scale
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kept, name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = torch.utils._pytree.tree_map(_given, (args, kwargs or {}))
        return function(*args, **kwargs)


def _of_logits(name: str) -> Function:
    def operator(self: Promise, *args: Any) -> Any:
        return getattr(self.kept, name)(*args)

    return operator


_BINARY = ("add", "sub", "truediv", "pow", "matmul")
_OTHERS = ("neg", "abs", "len", "getitem", "iter", "lt", "le", "gt", "ge")
# Python looks operators up on the class.
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS):
    setattr(Promise, f"__{_name}__", _of_logits(f"__{_name}__"))


def _given(value: Any) -> Any:
    return value.kept if isinstance(value, Promise) else value


def obstacle_in(model: Any) -> str | None:
    """Why this model, or view of one, takes stock's way; None if it does not."""
    layer = getattr(model, "output_layer", None)
    if layer is None:
        return "the model has no output layer"
    base = getattr(sys.modules.get(LANGUAGE), "LanguageModule", None)
    loss = "compute_language_model_loss"
    if base is None or getattr(type(model), loss, None) is not getattr(base, loss) or loss in vars(model):
        return f"{type(model).__name__} computes its loss by a function of its own"
    if getattr(model.config, "config_logger_dir", ""):
        return "config_logger_dir writes the logits"
    return obstacle_of(layer)


def _promising(layer: Any, chosen: _Chosen) -> Any:
    """A view of an output layer that returns promises."""

    def forward(input_: Any, weight: Any = None, runtime_gather_output: Any = None, **others: Any) -> Any:
        head = head_of(layer, input_, weight, runtime_gather_output)
        if others:
            head = f"the output layer is given {', '.join(others)}"
        if isinstance(head, Head):
            return Promise(head), None
        chosen.say(head)
        return layer.forward(input_, weight=weight, runtime_gather_output=runtime_gather_output, **others)

    return view_of(layer, forward=forward)


def _no_argument(args: Any, kwargs: Any) -> None:
    return None


def _computing_loss(original: Function, chosen: _Chosen) -> Function:
    """For a function of a model that makes logits and the loss."""
    labels_of, processor_of = argument(original, "labels"), _no_argument
    if "output_processor" in inspect.signature(original).parameters:
        processor_of = argument(original, "output_processor")

    @functools.wraps(original)
    def computing_loss(*args: Any, **kwargs: Any) -> Any:
        model, *others = args
        if (
            not chosen.fuse
            or not model.post_process
            or labels_of(args, kwargs) is None
            or processor_of(args, kwargs) is not None
            or torch.compiler.is_compiling()
            or obstacle_in(model)
        ):
            return original(*args, **kwargs)
        view = view_of(model, output_layer=_promising(model.output_layer, chosen))
        return original(view, *others, **kwargs)

    return computing_loss


def _compute_language_model_loss(original: Function, chosen: _Chosen) -> Function:
    labels_of, logits_of = argument(original, "labels"), argument(original, "logits")

    @functools.wraps(original)
    def compute_language_model_loss(*args: Any, **kwargs: Any) -> Any:
        logits = logits_of(args, kwargs)
        if isinstance(logits, Promise):
            return logits.head.losses(labels_of(args, kwargs), logits.scale)
        return original(*args, **kwargs)

    return compute_language_model_loss


def _compute_mtp_acceptance_counts(original: Function, chosen: _Chosen) -> Function:
    """From 0.19: counts over some tokens at a time, and adds them up."""
    logits_of, put_logits = argument(original, "mtp_logits"), replacing(original, "mtp_logits")
    labels_of, put_labels = argument(original, "mtp_labels"), replacing(original, "mtp_labels")
    mask_of, put_mask = argument(original, "loss_mask"), replacing(original, "loss_mask")

    @functools.wraps(original)
    def _compute_mtp_acceptance_counts(*args: Any, **kwargs: Any) -> Any:
        promise = logits_of(args, kwargs)
        if not isinstance(promise, Promise):
            return original(*args, **kwargs)
        labels, mask = labels_of(args, kwargs), mask_of(args, kwargs)
        counts = []
        for tokens, logits in promise.head.tiles():
            args, kwargs = put_labels(*put_logits(args, kwargs, logits), labels[:, tokens])
            args, kwargs = put_mask(args, kwargs, mask[:, tokens])
            counts.append(original(*args, **kwargs))
        return tuple(torch.stack(of_tiles).sum(0) for of_tiles in zip(*counts))

    return _compute_mtp_acceptance_counts


_LOSSES = {LANGUAGE + ":LanguageModule.compute_language_model_loss": _compute_language_model_loss}
BINDINGS: dict[str, dict[str, Callable[..., Function]]] = {
    "forward": {**_LOSSES, GPT + "forward": _computing_loss, MAMBA: _computing_loss},
    "mamba": {**_LOSSES, GPT + "_postprocess": _computing_loss, MAMBA: _computing_loss},
    "hybrid": {**_LOSSES, GPT + "_postprocess": _computing_loss, HYBRID: _computing_loss},
}
BINDINGS["counts"] = {**BINDINGS["hybrid"], COUNTS: _compute_mtp_acceptance_counts}


def problems(models: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Says for shim.check() which models take stock's way."""
    for model in models:
        if getattr(model, "post_process", False) and hasattr(model, "compute_language_model_loss"):
            why = obstacle_in(model)
            if why:
                yield f"{why}, so the logits are made as a whole", "remove that, or leave the option `fuse` off"


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    chosen = _Chosen(options)
    return {target: functools.partial(factory, chosen=chosen) for target, factory in BINDINGS[variant].items()}
