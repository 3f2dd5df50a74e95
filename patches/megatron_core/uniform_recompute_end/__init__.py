"""Uniform recompute of layers whose number is no multiple of recompute_num_layers.

What is wrong (0.12 to 0.16): with recompute_granularity="full" and recompute_method="uniform", TransformerBlock
recomputes its layers in chunks of recompute_num_layers. The last chunk is never cut short. If the layers of a pipeline
rank do not fill it, forward asks for a layer behind the last one, and raises an IndexError in the first step of
training. Three layers in chunks of two are enough. Pipeline stages of unequal length meet it on one stage only.

The patch lets TransformerBlock._get_layer return, behind the last layer, one that hands on the states [s, b, h] and the
context as they came. Forward and recompute both ask that method, so both run the same layers. Nothing is computed or
kept for what is not there. A number behind the end is an IndexError as before wherever nothing is recomputed in chunks.

Upstream: 0.17 cuts the last chunk short (Megatron-LM pull request 3562). Layers of multi-token prediction are
recomputed one by one, and the hybrid block has this recompute since 0.18 only, so neither has the defect.

Delete when: megatron-core 0.16 is not supported.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function, argument
from shim.patches._stubs import WIDTH, config_of, device_of, view_of
from shim.patches._views import Called

GET_LAYER = "megatron.core.transformer.transformer_block:TransformerBlock._get_layer"


def _get_layer(original: Function) -> Function:
    number_of = argument(original, "layer_number")

    @functools.wraps(original)
    def _get_layer(*args: Any, **kwargs: Any) -> Any:
        block, number = args[0], number_of(args, kwargs)
        if len(block.layers) <= number < _end_of_chunks(block):
            # Blocks choose an FP8 context by the number of a layer, here of the last one.
            return Called(block.layers[-1], _nothing)
        return original(*args, **kwargs)

    return _get_layer


def _end_of_chunks(block: Any) -> int:
    """The number behind the last layer that the chunks of the block ask for. Zero where there are no chunks."""
    config = block.config
    if config.recompute_granularity != "full" or config.recompute_method != "uniform":
        return 0
    size: int = config.recompute_num_layers
    return -(-len(block.layers) // size) * size


def _nothing(hidden_states: Any, context: Any = None, **rest: Any) -> tuple[Any, Any]:
    return hidden_states, context


class _Layer:
    """In the place of a layer: counts how often it runs."""

    def __init__(self, number: int, config: Any) -> None:
        self.layer_number, self.config, self.runs = number, config, 0

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        self.runs += 1
        return hidden_states * 2, None


class _Layers(list[_Layer]):
    def parameters(self) -> Iterator[torch.Tensor]:
        return iter(())


def probe(module: Any, method: str, models: list[Any]) -> bool:
    """Runs three layers in chunks of two. See docs/patch-modules.md."""
    config = module.config
    uneven = len(module.layers) < _end_of_chunks(module)
    if not uneven:
        return True  # the override never has to end a chunk early
    config = config_of(module, fp8=None, fp4=None, cpu_offloading=False, recompute_num_layers=2)
    layers = _Layers(_Layer(number, config) for number in (1, 2, 3))
    view = view_of(
        module,
        config,
        layers=layers,
        num_layers_per_pipeline_rank=len(layers),
        pre_process=True,
        final_layernorm=None,
        offload_context=contextlib.nullcontext(),
        training=True,
    )
    try:
        output = view.forward(torch.ones(3, 1, WIDTH, device=device_of(module), requires_grad=True), None)
    except IndexError:
        return False
    return [layer.runs for layer in layers] == [1, 1, 1] and bool((output == 8).all())


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {GET_LAYER: _get_layer}
