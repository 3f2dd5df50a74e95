"""Activation recompute of one multi-token prediction layer, for all releases.

For unpacked rows in mtp-recompute, and for packed rows in mtp-packed-sequences.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shim.patches._arguments import add_parameters, by_name, parameters_of, takes, takes_any
from shim.patches.megatron_core._mtp_layers import number_in_block

# By name, or by position after the recomputed function.
ACTIVATIONS = ("hidden_states", 0, "decoder_input", 1)

Arguments = Mapping[Any, Any]  # by name or position


def checkpointed_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of MultiTokenPredictionLayer._checkpointed_forward, from 0.14.

    Up to 0.17 the recomputed function is the first argument. Later it is self._proj_and_transformer_layer, but
    subclasses written for earlier releases still pass a function.
    """
    names, named = inspect.signature(original).parameters, by_name(original)
    takes_function = "forward_func" in names

    @functools.wraps(original)
    def _checkpointed_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = kwargs.pop("forward_func", None)
        if args and callable(args[0]) and not isinstance(args[0], Tensor):
            function, args = args[0], args[1:]
        elif not takes_function:
            args, kwargs = (), named((self, *args), kwargs)
            del kwargs[next(iter(names))]
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        return checkpointed(self, function or self._proj_and_transformer_layer, arguments)

    if not takes_function:
        # 0.18 passes padding_mask, which its own function does not take.
        add_parameters(_checkpointed_forward, original, "padding_mask")
        layer = vars(sys.modules[original.__module__])["MultiTokenPredictionLayer"]
        known = parameters_of(layer._proj_and_transformer_layer)
        # Somebody's wrapper around it may take any, and hand them on: padding_mask as well.
        added = inspect.signature(_checkpointed_forward).parameters
        takes(_checkpointed_forward, added if takes_any(known) else known)
    else:
        takes(_checkpointed_forward, ["forward_func"])
    return _checkpointed_forward


def checkpointed(layer: Any, function: Callable[..., Any], arguments: Arguments) -> Any:
    """Call `function` with `arguments`. Backward recomputes it if the layer's config asks for that.

    layer: the MTP layer. Its config has the method; its parameters show whether the layer is trained.
    function: the recomputed function. It returns hidden_states [s, b, h].
    arguments: by name, or by position. The checkpoint always saves those in ACTIVATIONS (tensors [s, b, h]), and
        other tensors only if they require a gradient. The recomputed function holds the rest, because a checkpoint
        saves tensors only (packed_seq_params is none).

    Method "uniform" recomputes every layer as a separate chunk and ignores recompute_num_layers. Method "block"
    recomputes the first recompute_num_layers layers of the MTP block. Any other method is a ValueError, as upstream.
    """
    method = layer.config.recompute_method
    if method not in ("uniform", "block"):
        raise ValueError(f"recompute_method is {method!r}; it must be 'uniform' or 'block'")
    saved = _saved(arguments)
    if method == "block" and number_in_block(layer) >= layer.config.recompute_num_layers:
        saved = {}
    elif not any(value.requires_grad for value in saved.values()):
        saved = _made_differentiable(layer, saved)
    if not saved or not torch.is_grad_enabled():
        return _call(function, arguments)
    if layer.config.distribute_saved_activations:
        saved = _first_apart(saved)
    kept = {key: value for key, value in arguments.items() if key not in saved}

    def run(*values: Any) -> Any:
        # Puts the layer into a cell of the closure. Trainers whose backward frees the inputs of checkpoints look for an
        # MTP layer there, because its inputs are still needed.
        _ = layer
        return _differentiable(_call(function, {**kept, **dict(zip(saved, values))}))

    return _checkpoint(layer, run, list(saved.values()))


def _call(function: Callable[..., Any], arguments: Arguments) -> Any:
    by_position = [arguments[key] for key in sorted(key for key in arguments if isinstance(key, int))]
    return function(*by_position, **{key: value for key, value in arguments.items() if isinstance(key, str)})


def _saved(arguments: Arguments) -> dict[str | int, Tensor]:
    """The inputs of the checkpoint. hidden_states comes first, because the first input is distributed over ranks."""
    tensors = {key: value for key, value in arguments.items() if isinstance(value, Tensor)}
    first = {key: tensors[key] for key in ACTIVATIONS if key in tensors}
    return {**first, **{key: value for key, value in tensors.items() if value.requires_grad}}


def _made_differentiable(layer: Any, saved: dict[str | int, Tensor]) -> dict[str | int, Tensor]:
    """The inputs with one made to require a gradient, if the layer has trainable weights; else {}.

    With frozen base weights no input may require a gradient. Then the output of the checkpoint would not either, and
    adapters inside would never train.
    """
    key = next(iter(saved), None)
    if key is None or not any(weight.requires_grad for weight in layer.parameters()):
        return {}
    return {**saved, key: saved[key].detach().requires_grad_()}


def _first_apart(saved: dict[str | int, Tensor]) -> dict[str | int, Tensor]:
    """Replace the first input by a view: distribution cuts the tensor's data, and the caller may hold the tensor."""
    from megatron.core.utils import make_viewless_tensor

    key, value = next(iter(saved.items()))
    apart = make_viewless_tensor(inp=value.view_as(value), requires_grad=value.requires_grad, keep_graph=True)
    return {**saved, key: apart}


def _differentiable(output: Any) -> Any:
    """An output that backward can run through in the recompute, even if no part of it requires a gradient."""
    if torch.is_grad_enabled() and isinstance(output, Tensor) and not output.requires_grad:
        return output.detach().requires_grad_()
    return output


def _checkpoint(layer: Any, run: Callable[..., Any], values: list[Any]) -> Any:
    """Recompute one chunk with the contexts and the checkpoint that TransformerBlock of the same release uses."""
    from megatron.core import tensor_parallel

    config = layer.config
    if not quantized(config):
        return tensor_parallel.checkpoint(run, config.distribute_saved_activations, *values)
    from megatron.core.extensions.transformer_engine import te_checkpoint

    if not hasattr(layer, "_checkpointed_forward"):
        values = values + [None] * (5 - len(values))  # 0.12 takes exactly five inputs; `run` ignores the extra
    track = tensor_parallel.random.get_cuda_rng_tracker
    with _outer_context(config):
        return te_checkpoint(run, config.distribute_saved_activations, track, _tensor_parallel_group(layer), *values)


def quantized(config: Any) -> bool:
    return bool(config.fp8 or getattr(config, "fp4", None))


def _outer_context(config: Any) -> AbstractContextManager[Any]:
    """The context around the checkpoint, for delayed scaling only: amax is reduced once, when the region ends."""
    from megatron.core.enums import Fp8Recipe
    from megatron.core.fp8_utils import get_fp8_context

    delayed = config.fp8 and config.fp8_recipe == Fp8Recipe.delayed
    return get_fp8_context(config) if delayed else nullcontext()


def _tensor_parallel_group(layer: Any) -> Any:
    """The layer's own group. Up to 0.16 layers have none, and their modules use the group of parallel_state."""
    group = getattr(layer, "tp_group", None)
    if group is None:
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
    return group
