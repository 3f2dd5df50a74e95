"""Gradients of experts whose tensor-parallel size is not that of the other layers, without expert parallelism.

What is wrong (0.12 to 0.18): DistributedDataParallel sums the gradients of a weight over all data-parallel ranks. If
the weight says `allreduce=False`, it sums over the ranks that have the same experts. The layers of megatron-core, of
Transformer Engine and of modelopt say so if expert_model_parallel_size is above one. But the ranks are others as
soon as expert_tensor_parallel_size differs from tensor_model_parallel_size.
- Expert TP below TP: several tensor-parallel ranks have the same expert and different tokens. Each keeps only the
  gradient of its tokens, so the copies of an expert drift apart.
- Expert TP above TP: gradients of different parts of an expert are summed.
Both are silent. In 0.12 the local layers of an expert that is not cut also scatter its output over the tensor-parallel
ranks of the other layers, which is a crash, or gives other values.

The patch says `allreduce=False` for weights of experts if EP is above one or expert TP differs: when a MoELayer is
built, and when DistributedDataParallel wraps a model, for models and adapters that are there already. Weights that say
nothing about `allreduce` stay as they are. In 0.12 it also tells the local layers that the dispatcher sends the tokens.

The optimizer then has a separate part for experts, as under expert parallelism. So in such a layout an optimizer's
checkpoint that was written without the patch cannot be loaded with it, nor the other way round. Weights load either
way. A checkpoint that was written without the patch has one of the copies that have drifted apart. Other layouts are as
before.

With Transformer Engine 2.13 and later the gradient norm also needs the patch tp-attributes. Weights of experts lack the
attributes by which the norm counts them there, so ranks would have different norms.

Upstream: fixed by pull request 5916, in 0.19.

Delete when: releases before 0.19 are not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shim.patches._arguments import Function, argument

DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__"
MOE_LAYER = "megatron.core.transformer.moe.moe_layer:MoELayer.__init__"


def _moe_layer(original: Function, local: bool) -> Function:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _mark(self, local)

    return __init__


def _ddp(original: Function, local: bool) -> Function:
    module_of = argument(original, "module")

    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:
        for layer in _moe_layers(module_of(args, kwargs)):
            _mark(layer, local)
        original(*args, **kwargs)

    return __init__


def _moe_layers(model: Any) -> Iterator[Any]:
    """The mixtures of experts in a model."""
    loaded = sys.modules.get("megatron.core.transformer.moe.moe_layer")
    if loaded is not None:
        yield from (found for found in model.modules() if isinstance(found, loaded.BaseMoELayer))


def _mark(layer: Any, local: bool) -> None:
    """Let the weights of a layer's experts say what group they are reduced over. local: and the local layers, too."""
    if layer.experts is None or not _are_elsewhere(layer.config):
        return
    for weight in _wrong(layer):
        weight.allreduce = False
    if local:
        layers: Any = sys.modules["megatron.core.tensor_parallel.layers"]
        for linear in layer.experts.modules():
            if isinstance(linear, (layers.ColumnParallelLinear, layers.RowParallelLinear)) and linear.is_expert:
                linear.explicit_expert_comm = True


def _are_elsewhere(config: Any) -> bool:
    """Whether copies of an expert are on other ranks than copies of the other layers."""
    if config.expert_model_parallel_size > 1:
        return True
    if (config.expert_tensor_parallel_size or config.tensor_model_parallel_size) != config.tensor_model_parallel_size:
        return True
    # A config need not say it: the layers ask the groups.
    state: Any = sys.modules["megatron.core.parallel_state"]
    if not state.model_parallel_is_initialized():
        return False
    return bool(state.get_expert_tensor_parallel_world_size() != state.get_tensor_model_parallel_world_size())


def _wrong(layer: Any) -> list[Any]:
    """The weights of experts that want to be reduced as other weights are."""
    experts = () if layer.experts is None else layer.experts.parameters()
    return [weight for weight in experts if getattr(weight, "allreduce", None) is True]


def problems(models: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """What keeps the patch from its effect: gradients that are sorted already."""
    for model in models:
        for layer in _moe_layers(model):
            if _are_elsewhere(layer.config) and any(hasattr(weight, "main_grad") for weight in _wrong(layer)):
                yield (
                    "the model was in DistributedDataParallel before shim.apply(), with the wrong ranks for experts",
                    "call shim.apply() before the model is wrapped",
                )
                break


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    local = variant == "v0_12"
    return {DDP: functools.partial(_ddp, local=local), MOE_LAYER: functools.partial(_moe_layer, local=local)}
