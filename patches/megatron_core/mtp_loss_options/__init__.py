"""Multi-token prediction that leaves the main model alone, as two options.

What is missing (0.12 to 0.20): the loss of multi-token prediction (MTP) is always computed, and its gradient reaches
the main model by three ways: the hidden states that MTP starts from, the embedding of the next tokens, and the weight
of the output layer. Reinforcement learning must not train the policy on it. No release before 0.19 can detach it, and
none can leave the loss out.

The patch does nothing until an option is true:
- `detach` closes the three ways. MTP's own weights get the gradients that they have with stock, those of the main model
  the gradients that they have without MTP, bit for bit. A later depth still trains the earlier ones.
- `skip_loss` leaves the loss out, with its logits. MTP layers run, so that hooks on them or on the MTP block see their
  inputs and outputs. A trainer that computes its own loss on that can also have `detach`: the hidden states and the
  embedding are then without gradient, and the weight of the output layer is the trainer's own to detach.

Carried by: verl (detach_encoder) and slime detach hidden states and embeddings, and if they compute the loss
themselves the output weight; SkyRL leaves the loss out and detaches all three; mcore-bridge (mtp_decoder_input_detach)
detaches the embeddings alone.

Not covered:
- The expert all-to-all overlap runs MTP layers without their block, so `detach` misses the hidden states and the
  embedding there (mtp_detach_heads the hidden states). shim.check() says so.
- Parts of an output layer beside its weight, such as an adapter, are also trained by MTP, as with mtp_detach_heads.
  shim.check() says so.
- mcore-bridge runs MTP and its loss by other functions, which call none of these. It has a separate option.
- Clipping: the norm has the gradients of MTP in it. With mtp_detach_heads 0.19 clips them apart.
- 0.12 and 0.13 log a loss of zero under `skip_loss`. Later releases log none.
- An embedding on a stage behind the first that only MTP uses gets no gradient under `detach`. overlap_grad_reduce waits
  for one, as it does with mtp_detach_heads.

Upstream: 0.19 has a field of the config, mtp_detach_heads (Megatron-LM pull request 3456). To leave the loss out is
open.

Delete when: the oldest supported release has mtp_detach_heads and a way to leave the loss out.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shim.patches._arguments import Function, argument, replacing
from shim.patches._views import view_with
from shim.patches.megatron_core._mtp_layers import layers_on_earlier_stages

MTP = "megatron.core.transformer.multi_token_prediction:"
BLOCK = MTP + "MultiTokenPredictionBlock.forward"
LOSS = MTP + "process_mtp_loss"
POSTPROCESS = "megatron.core.models.gpt.gpt_model:GPTModel._postprocess"
# Further arguments of a block that come from the main model: the embeddings that mcore-bridge gives, and the streams of
# hyper-connections (dev branch).
ALSO = ("decoder_input", "mhc_multistream")


class _Chosen:
    """The options of the functions that hold it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.detach: bool = options["detach"]
        self.skip_loss: bool = options["skip_loss"]


_CHOSEN: weakref.WeakSet[_Chosen] = weakref.WeakSet()


class _Cut(torch.autograd.Function):
    """The same values in the same storage, through which no gradient goes back.

    The result requires a gradient where the input does, unlike a detached one. So a checkpoint is recomputed.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class _Joined(torch.autograd.Function):
    """The output of an MTP block, whose first rows, [s, b, h], hand their gradient on to `states`, [s, b, h], too."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, states: Tensor) -> Tensor:
        ctx.rows = states.size(0)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad[: ctx.rows]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _frozen_weight(layer: Any, weight: Tensor | None) -> Any:
    """What `layer` is to be called with for its weight: `weight`, or else its own, without gradient.

    The layer itself is called, because hooks on it may wait for its weight (overlap_param_gather).
    """
    return _detached(getattr(layer, "weight", None) if weight is None else weight)


def _with_frozen_weight(original: Function) -> Callable[[Any, Any], tuple[Any, Any]]:
    """A function that takes the gradient from the output weight of a call of `original`."""
    layer_of, weight_of = argument(original, "output_layer"), argument(original, "output_weight")
    put_weight = replacing(original, "output_weight")

    def prepare(args: Any, kwargs: Any) -> tuple[Any, Any]:
        return put_weight(args, kwargs, _frozen_weight(layer_of(args, kwargs), weight_of(args, kwargs)))

    return prepare


def _block(original: Function, chosen: _Chosen) -> Function:
    """Hidden states and embeddings reach MTP without gradient, and the main model's states go on as they are."""
    states_of, put_states = argument(original, "hidden_states"), replacing(original, "hidden_states")
    embedding_of, put_embedding = argument(original, "embedding"), replacing(original, "embedding")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not chosen.detach or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        block, embedding = args[0], embedding_of(args, kwargs)
        if embedding is not None:
            args, kwargs = put_embedding(args, kwargs, lambda *ids, **named: _detached(embedding(*ids, **named)))
        kwargs = {name: _detached(value) if name in ALSO else value for name, value in kwargs.items()}
        if layers_on_earlier_stages(block.config, getattr(block, "vp_stage", None)):
            return original(*args, **kwargs)  # the states come from a depth of MTP, which these depths train
        states = states_of(args, kwargs)
        args, kwargs = put_states(args, kwargs, _Cut.apply(states))
        return _Joined.apply(original(*args, **kwargs), states)

    return forward


def _block_with_loss(original: Function, chosen: _Chosen) -> Function:
    """0.12, 0.13: the block computes the loss, with an output layer and a loss function that it is given."""
    labels_of, forward_with_states = argument(original, "labels"), _block(original, chosen)
    with_frozen_weight, put_layer = _with_frozen_weight(original), replacing(original, "output_layer")
    put_loss = replacing(original, "compute_language_model_loss")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if chosen.skip_loss and labels_of(args, kwargs) is not None:
            args, kwargs = put_loss(*put_layer(args, kwargs, _no_logits), _no_loss)
        elif chosen.detach and torch.is_grad_enabled():
            args, kwargs = with_frozen_weight(args, kwargs)
        return forward_with_states(*args, **kwargs)

    return forward


def _no_logits(states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return states, None


def _no_loss(labels: Tensor, states: Tensor) -> Tensor:
    return torch.zeros_like(labels, dtype=states.dtype)


def _process_mtp_loss(original: Function, chosen: _Chosen) -> Function:
    """From 0.17: the loss is in a function of its own."""
    states_of, config_of = argument(original, "hidden_states"), argument(original, "config")
    with_frozen_weight = _with_frozen_weight(original)

    @functools.wraps(original)
    def process_mtp_loss(*args: Any, **kwargs: Any) -> Any:
        if chosen.skip_loss:
            return _main_states(states_of(args, kwargs), config_of(args, kwargs).mtp_num_layers)
        if chosen.detach and torch.is_grad_enabled():
            args, kwargs = with_frozen_weight(args, kwargs)
        return original(*args, **kwargs)

    return process_mtp_loss


def _main_states(states: Tensor, depths: int) -> Tensor:
    """Those of the main model, [s, b, h], which come before those of each depth in [(1 + depths) s, b, h]."""
    return states.chunk(1 + depths, dim=0)[0]


def _postprocess(original: Function, chosen: _Chosen, computes_loss: Callable[[Any], bool]) -> Function:
    """0.14 to 0.16: the model computes the loss of each depth, and then its own."""
    states_of, put_states = argument(original, "hidden_states"), replacing(original, "hidden_states")
    mtp_of, labels_of = argument(original, "mtp_in_postprocess"), argument(original, "labels")

    @functools.wraps(original)
    def _postprocess(*args: Any, **kwargs: Any) -> Any:
        model, *others = args
        if not (chosen.skip_loss or chosen.detach) or not model.post_process or not computes_loss(model):
            return original(*args, **kwargs)
        depths = model.config.mtp_num_layers
        if chosen.skip_loss:
            if not mtp_of(args, kwargs):  # MTP has run already
                args, kwargs = put_states(args, kwargs, _main_states(states_of(args, kwargs), depths))
            return original(_without_loss(model, depths), *args[1:], **kwargs)
        if labels_of(args, kwargs) is None or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        view = view_with(model, output_layer=_frozen_at_first(model.output_layer, depths))
        return original(view, *others, **kwargs)

    return _postprocess


def _without_loss(model: Any, depths: int) -> Any:
    """A view of the model that runs MTP and goes on with the main model's states."""
    # On the last of several stages with MTP the weight that tied embeddings share depends on mtp_process.
    weight = model.shared_embedding_or_output_weight
    return view_with(
        model,
        config=view_with(model.config, mtp_num_layers=None),
        mtp_process=False,
        mtp=lambda *args, **kwargs: _main_states(model.mtp(*args, **kwargs), depths),
        shared_embedding_or_output_weight=weight,
    )


def _frozen_at_first(layer: Any, calls: int) -> Function:
    """An output layer whose first calls, those of MTP, give its weight no gradient."""
    left = [calls]

    def output_layer(*args: Any, **kwargs: Any) -> Any:
        if not left[0]:
            return layer(*args, **kwargs)
        left[0] -= 1
        return layer(*args, **{**kwargs, "weight": _frozen_weight(layer, kwargs.get("weight"))})

    return output_layer


def _has_mtp(model: Any) -> bool:
    return bool(model.mtp_process)


def _has_mtp_on_any_stage(model: Any) -> bool:
    return model.config.mtp_num_layers is not None


BINDINGS: dict[str, dict[str, Callable[..., Function]]] = {
    "v0_12": {BLOCK: _block_with_loss},
    "v0_14": {BLOCK: _block, POSTPROCESS: functools.partial(_postprocess, computes_loss=_has_mtp)},
    "v0_16": {BLOCK: _block, POSTPROCESS: functools.partial(_postprocess, computes_loss=_has_mtp_on_any_stage)},
    "v0_17": {BLOCK: _block, LOSS: _process_mtp_loss},
}


def problems(models: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Says for shim.check() what `detach` does not reach."""
    for model in models if any(each.detach for each in list(_CHOSEN)) else ():
        for name, weight in model.named_parameters():
            if weight.requires_grad and "output_layer." in name and not name.endswith("output_layer.weight"):
                yield f"multi-token prediction trains {name} too", "freeze it"
        if getattr(getattr(model, "config", None), "overlap_moe_expert_parallel_comm", False):
            remedy = "switch overlap_moe_expert_parallel_comm off"
            yield "the expert all-to-all overlap runs multi-token prediction without its block", remedy


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    chosen = _Chosen(options)
    _CHOSEN.add(chosen)
    return {target: functools.partial(factory, chosen=chosen) for target, factory in BINDINGS[variant].items()}
