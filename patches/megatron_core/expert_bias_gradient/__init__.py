"""Gradients of the biases of experts under sequence parallelism.

What is wrong (0.12.0, and 0.15 to main; between them experts cannot have biases): the local layers mark a row-parallel
bias `sequence_parallel`, also that of an expert's linear_fc2. finalize_model_grads sums the gradients of marked
parameters over the tensor-parallel ranks. With an expert TP of one, as biases of experts require, these ranks have
different experts if EP is above one. So each bias silently also gets the gradients of other experts. All ranks
that have an expert have summed its gradients before, because it says `allreduce=False`.

What the patch does: when DistributedDataParallel wraps a model whose experts have a tensor parallelism of one,
parameters of experts that say `allreduce=False` lose the mark. No message more is sent; the sum over tensor-parallel
ranks has these biases no more. Weights, the optimizer's state and checkpoints are as before.

What it leaves alone: experts that are cut, because a trainer's adapters may want the sum; parameters that are reduced
with all others; models of Megatron-FSDP, which has another wrapper. The mark stays gone after shim.revert(), on models
that were wrapped before.

Upstream: open.

Delete when: a release marks no biases of experts, and those before it are not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shim.patches._arguments import Function, argument

DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__"


def _ddp(original: Function) -> Function:
    module_of = argument(original, "module")

    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        # Behind expert-grad-groups, whichever of the two is outside: it has said `allreduce=False` by now.
        for weight in _marked(module_of(args, kwargs)):
            weight.sequence_parallel = False

    return __init__


def _marked(model: Any) -> Iterator[Any]:
    """Parameters of experts whose gradients are to be summed over ranks that have other experts."""
    loaded = sys.modules.get("megatron.core.transformer.moe.moe_layer")
    layers = () if loaded is None else (found for found in model.modules() if isinstance(found, loaded.BaseMoELayer))
    for layer in layers:
        config = layer.config
        if layer.experts is None or (config.expert_tensor_parallel_size or config.tensor_model_parallel_size) != 1:
            continue
        for weight in layer.experts.parameters():
            if getattr(weight, "sequence_parallel", False) and not getattr(weight, "allreduce", True):
                yield weight


def problems(models: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """What keeps the patch from its effect: parameters that have their mark still."""
    for model in models:
        if any(hasattr(weight, "main_grad") for weight in _marked(model)):
            yield (
                "the model was in DistributedDataParallel before shim.apply(), so its experts' biases have their mark",
                "call shim.apply() before the model is wrapped",
            )


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {DDP: _ddp}
