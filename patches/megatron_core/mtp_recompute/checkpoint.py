"""Activation recompute of one multi-token prediction layer, packed rows or not; one implementation for all releases."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shim.patches._arguments import add_parameters, takes

# By name, or by position behind the recomputed function: hidden_states first, decoder_input second.
ACTIVATIONS = ("hidden_states", 0, "decoder_input", 1)

Arguments = Mapping[Any, Any]  # by name or position


def checkpointed_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """What takes the place of MultiTokenPredictionLayer._checkpointed_forward, 0.14 to 0.19.

    Up to 0.17 the recomputed function is an argument in front of the others; later it is
    self._proj_and_transformer_layer, but subclasses written for earlier releases pass one all the same.
    """
    names = list(inspect.signature(original).parameters)
    takes_function = "forward_func" in names

    @functools.wraps(original)
    def _checkpointed_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = kwargs.pop("forward_func", None)
        if args and callable(args[0]) and not isinstance(args[0], Tensor):
            function, args = args[0], args[1:]
        elif not takes_function:
            args, kwargs = (), {**dict(zip(names[1:], args)), **kwargs}
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        return checkpointed(self, function or self._proj_and_transformer_layer, arguments)

    if not takes_function:
        add_parameters(_checkpointed_forward, original, "padding_mask")  # 0.18 passes one that it does not take
        layer = vars(sys.modules[original.__module__])["MultiTokenPredictionLayer"]
        takes(_checkpointed_forward, inspect.signature(layer._proj_and_transformer_layer).parameters)
    else:
        takes(_checkpointed_forward, ["forward_func"])
    return _checkpointed_forward


def checkpointed(layer: Any, function: Callable[..., Any], arguments: Arguments) -> Any:
    """`function` with `arguments`, recomputed in backward where the layer's config wants that.

    layer: the MTP layer; its config is asked for the method, its parameters for whether anything in it is trained.
    function: what is recomputed; returns hidden_states [s, b, h].
    arguments: by name, or by position. Those in ACTIVATIONS (tensors [s, b, h]) are always saved by the checkpoint,
        other tensors only where they require a gradient; all the rest is kept in the recomputed function, because
        a checkpoint can save nothing but tensors (packed_seq_params is none).

    Method "uniform" makes every layer a chunk of its own, whatever recompute_num_layers; "block" recomputes the first
    recompute_num_layers layers of the MTP block. Raises ValueError for any other method, as upstream does.
    """
    method = layer.config.recompute_method
    if method not in ("uniform", "block"):
        raise ValueError(f"recompute_method is {method!r}; it must be 'uniform' or 'block'")
    saved = _saved(arguments)
    if method == "block" and _number_in_block(layer) >= layer.config.recompute_num_layers:
        saved = {}
    elif not any(value.requires_grad for value in saved.values()):
        saved = _made_differentiable(layer, saved)
    if not saved or not torch.is_grad_enabled():
        return _call(function, arguments)
    if layer.config.distribute_saved_activations:
        saved = _first_apart(saved)
    kept = {key: value for key, value in arguments.items() if key not in saved}

    def run(*values: Any) -> Any:
        # Makes the layer one of the closure's own cells: trainers whose backward frees the inputs of checkpoints look
        # for it there, because those of an MTP layer are still needed.
        _ = layer
        return _differentiable(_call(function, {**kept, **dict(zip(saved, values))}))

    return _checkpoint(layer, run, list(saved.values()))


def _call(function: Callable[..., Any], arguments: Arguments) -> Any:
    by_position = [arguments[key] for key in sorted(key for key in arguments if isinstance(key, int))]
    return function(*by_position, **{key: value for key, value in arguments.items() if isinstance(key, str)})


def _saved(arguments: Arguments) -> dict[str | int, Tensor]:
    """The inputs of the checkpoint, hidden_states first: that is the one which is distributed over ranks."""
    tensors = {key: value for key, value in arguments.items() if isinstance(value, Tensor)}
    first = {key: tensors[key] for key in ACTIVATIONS if key in tensors}
    return {**first, **{key: value for key, value in tensors.items() if value.requires_grad}}


def _number_in_block(layer: Any) -> int:
    """Which of the MTP layers of this pipeline stage it is, from 0; layers are numbered from 1 over all stages."""
    return layer.layer_number - 1 - layers_on_earlier_stages(layer.config, getattr(layer, "vp_stage", None))


def has_layout(config: Any) -> bool:
    """Whether layers are laid out over pipeline stages freely (0.16 and later, where MTP layers may be anywhere)."""
    return getattr(config, "pipeline_model_parallel_layout", None) is not None


def layers_on_earlier_stages(config: Any, vp_stage: int | None) -> int:
    """How many MTP layers the stages before this one hold; only a layout (0.16 and later) can put any there."""
    if not has_layout(config):
        return 0
    from megatron.core.transformer.multi_token_prediction import get_mtp_layer_offset

    return get_mtp_layer_offset(config, vp_stage)


def _made_differentiable(layer: Any, saved: dict[str | int, Tensor]) -> dict[str | int, Tensor]:
    """Inputs of which one requires a gradient, for a layer that has weights to train; {} for one that has none.

    With the base weights frozen no input may require one. The output of a checkpoint would not either then, and
    adapters inside would never be trained.
    """
    key = next(iter(saved), None)
    if key is None or not any(weight.requires_grad for weight in layer.parameters()):
        return {}
    return {**saved, key: saved[key].detach().requires_grad_()}


def _first_apart(saved: dict[str | int, Tensor]) -> dict[str | int, Tensor]:
    """The first input as a tensor of its own: distributing it cuts its data, and the caller may hold that tensor."""
    from megatron.core.utils import make_viewless_tensor

    key, value = next(iter(saved.items()))
    apart = make_viewless_tensor(inp=value.view_as(value), requires_grad=value.requires_grad, keep_graph=True)
    return {**saved, key: apart}


def _differentiable(output: Any) -> Any:
    """In the recompute, an output through which backward can run, even where nothing in it has a gradient."""
    if torch.is_grad_enabled() and isinstance(output, Tensor) and not output.requires_grad:
        return output.detach().requires_grad_()
    return output


def _checkpoint(layer: Any, run: Callable[..., Any], values: list[Any]) -> Any:
    """One chunk, under the contexts and by the checkpoint that TransformerBlock of the same release chooses."""
    from megatron.core import tensor_parallel

    config = layer.config
    if not quantized(config):
        return tensor_parallel.checkpoint(run, config.distribute_saved_activations, *values)
    from megatron.core.extensions.transformer_engine import te_checkpoint

    if not hasattr(layer, "_checkpointed_forward"):
        values = values + [None] * (5 - len(values))  # 0.12 takes exactly five inputs; `run` needs no more than it has
    track = tensor_parallel.random.get_cuda_rng_tracker
    with _outer_context(config):
        return te_checkpoint(run, config.distribute_saved_activations, track, _tensor_parallel_group(layer), *values)


def quantized(config: Any) -> bool:
    return bool(config.fp8 or getattr(config, "fp4", None))


def _outer_context(config: Any) -> AbstractContextManager[Any]:
    """Around the checkpoint, with delayed scaling only: there amax is reduced once, when the region ends."""
    from megatron.core.enums import Fp8Recipe
    from megatron.core.fp8_utils import get_fp8_context

    delayed = config.fp8 and config.fp8_recipe == Fp8Recipe.delayed
    return get_fp8_context(config) if delayed else nullcontext()


def _tensor_parallel_group(layer: Any) -> Any:
    """The layer's own group; up to 0.16 layers keep none, and everything in them uses that of parallel_state."""
    group = getattr(layer, "tp_group", None)
    if group is None:
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
    return group
