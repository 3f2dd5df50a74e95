"""The losses of a model from hidden states and the output weight, without logits, as an option.

What is large (0.12 to 0.20): with labels, a model computes all logits, [s, b, V / TP], and the loss of each token from
them. Logits, their softmax and their gradient are the largest tensors of a step. Multi-token prediction (MTP) makes
them once more at each depth.

The patch does nothing until the option `fuse` is true. Then a call with labels returns the same losses, [b, s], from
shim.ops.linear_token_logprobs, for the main model and for MTP. Logits exist one tile at a time, in forward and again in
backward.
- The model computes its loss on a view of itself. The view's output layer returns a promise of logits, and
  compute_language_model_loss takes promises. Any other code that touches a promise gets the logits themselves, or an
  error if their gradient would be lost.
- The work of ColumnParallelLinear around its product stays: sums over tensor-parallel ranks, the gather of
  sequence-parallel shards, the sum in main_grad of gradient_accumulation_fusion, which is not rounded before. A frozen
  weight gets no gradient.
- A LoRA adapter of Megatron-Bridge around the output layer runs itself. Its second layer also promises its logits, and
  two promises add up to one: the losses are made with a second product of low rank.
- Hooks before the output layer's forward run as before. They get a view of the layer.
- A negative label means no target: loss and gradient are zero, as with chunked-logprob.
- With the option `skip_masked` as well, tokens without a target, and those that the model's loss_mask leaves out, do
  not reach the product. Their loss is then zero; stock returns one, which the trainer multiplies by zero.
- cross_entropy_loss_fusion changes nothing any more.

No release has label smoothing, z-loss or a temperature in this loss.

A model takes stock's way, and shim.check() says why, if
- its output layer, or the adapter around it, is of another class, such as one in FP8, or has a bias, a
  submodule, or hooks that want its logits; an adapter also if it has its dropout behind its second layer,
- its compute_language_model_loss is not upstream's,
- the config has defer_embedding_wgrad_compute, GTP or config_logger_dir.
A call takes stock's way without labels, with an output_processor, and under torch.compile. It does so with a warning
under autocast, with gathered logits (runtime_gather_output), with logits in another dtype than the hidden states, and
under Megatron-FSDP with gradient_accumulation_fusion.

0.19 counts which predictions of MTP are right, for a log in training. It gets the largest logit of each token from the
pass that makes the loss.

Upstream: cross_entropy_fusion_impl="linear" on the dev branch, on Blackwell only. With it stock's way is taken.

Delete when: the oldest supported release has such a loss on every device.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function, argument, replacing
from shim.patches._views import view_with
from shim.patches.megatron_core._linear_heads import obstacle_of, promising
from shim.patches.megatron_core._linear_losses import NO_TARGET
from shim.patches.megatron_core._promised_logits import Promise

log = logging.getLogger("shim")

ID = "fused-linear-logprob"
GPT = "megatron.core.models.gpt.gpt_model:GPTModel."
MAMBA = "megatron.core.models.mamba.mamba_model:MambaModel.forward"
HYBRID = "megatron.core.models.hybrid.hybrid_model:HybridModel.forward"
LANGUAGE = "megatron.core.models.common.language_module.language_module"


class _Chosen:
    """The options of the functions that hold it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.fuse: bool = options["fuse"]
        self.skip: bool = options["skip_masked"]
        self.said: set[str] = set()

    def say(self, why: str, so: str = "a call makes its logits as a whole") -> None:
        """Warn once of each reason why a call takes stock's way."""
        if why not in self.said:
            self.said.add(why)
            log.warning(f"{ID}: {why}, so {so}")


def obstacle_in(model: Any) -> str | None:
    """Why this model, or view of one, takes stock's way; None if it does not."""
    layer = getattr(model, "output_layer", None)
    if layer is None:
        return "the model has no output layer"
    base = getattr(sys.modules.get(LANGUAGE), "LanguageModule", None)
    loss = "compute_language_model_loss"
    if base is None or getattr(type(model), loss, None) is not getattr(base, loss) or loss in vars(model):
        return f"{type(model).__name__} computes its loss by another function"
    if getattr(model.config, "config_logger_dir", ""):
        return "config_logger_dir writes the logits"
    return obstacle_of(layer)


def _no_argument(args: Any, kwargs: Any) -> None:
    return None


def _computing_loss(original: Function, chosen: _Chosen, counts: bool = False) -> Function:
    """For a function of a model that makes logits and the loss. counts: it counts right predictions of MTP, as 0.19."""
    labels_of, with_labels = argument(original, "labels"), replacing(original, "labels")
    known = inspect.signature(original).parameters
    # The first from 0.18 on; the second everywhere but in the Mamba model before 0.17.
    processor_of, mask_of = (
        argument(original, name) if name in known else _no_argument for name in ("output_processor", "loss_mask")
    )

    @functools.wraps(original)
    def computing_loss(*args: Any, **kwargs: Any) -> Any:
        model, labels = args[0], labels_of(args, kwargs)
        if (
            not chosen.fuse
            or not model.post_process
            or labels is None
            or processor_of(args, kwargs) is not None
            or torch.compiler.is_compiling()
            or obstacle_in(model)
        ):
            return original(*args, **kwargs)
        predicts = counts and model.training and bool(model.config.mtp_num_layers)
        view = view_with(model, output_layer=promising(model.output_layer, chosen.say, predicts))
        mask = mask_of(args, kwargs) if chosen.skip else None
        if mask is not None and mask.shape == labels.shape:
            # The labels of MTP are rolled from these, as its mask is.
            args, kwargs = with_labels(args, kwargs, labels.masked_fill(mask == 0, NO_TARGET))
        elif mask is not None:
            chosen.say(
                f"loss_mask has the shape {list(mask.shape)}, and labels have {list(labels.shape)}", "it skips none"
            )
        return original(view, *args[1:], **kwargs)

    return computing_loss


def _compute_language_model_loss(original: Function, chosen: _Chosen) -> Function:
    labels_of, logits_of = argument(original, "labels"), argument(original, "logits")

    @functools.wraps(original)
    def compute_language_model_loss(*args: Any, **kwargs: Any) -> Any:
        logits = logits_of(args, kwargs)
        if isinstance(logits, Promise):
            return logits.losses(labels_of(args, kwargs), chosen.skip)
        return original(*args, **kwargs)

    return compute_language_model_loss


_LOSSES = {LANGUAGE + ":LanguageModule.compute_language_model_loss": _compute_language_model_loss}
BINDINGS: dict[str, dict[str, Callable[..., Function]]] = {
    "v0_12": {**_LOSSES, GPT + "forward": _computing_loss, MAMBA: _computing_loss},
    "v0_13": {**_LOSSES, GPT + "_postprocess": _computing_loss, MAMBA: _computing_loss},
    "v0_18": {**_LOSSES, GPT + "_postprocess": _computing_loss, HYBRID: _computing_loss},
}
_counting = functools.partial(_computing_loss, counts=True)
BINDINGS["v0_19"] = {**_LOSSES, GPT + "_postprocess": _counting, HYBRID: _counting}


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
