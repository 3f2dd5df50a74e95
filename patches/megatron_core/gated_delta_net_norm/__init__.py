"""The output norm of gated delta net under tensor parallelism.

What is wrong (0.16 to 0.20): each tensor-parallel rank norms the heads that it has, all with the same weight. So the
gradient of that weight is a sum over ranks. Under sequence parallelism finalize_model_grads sums it, with those of all
norms. Without sequence parallelism nothing does: each rank trains its copy with its own part of the gradient, too small
and different from rank to rank. The copies of the weight drift apart, and a checkpoint keeps that of the first rank.

The patch: after the gradients that finalize_model_grads sums over tensor-parallel ranks, as those of q_layernorm, it
sums those of the output norms in the same way, in one more all-reduce. That is one small message a step, for any
number of layers and of microbatches. Nothing happens under sequence parallelism, without tensor parallelism, for
frozen norms and for models without gated delta net. Copies that have drifted apart stay apart until a checkpoint is
loaded.

Upstream: open (issue 7452, finding 11).

A trainer may have another function in the place of _allreduce_non_tensor_model_parallel_grads, as slime has, which sums
in chunks and has the same defect. The patch holds around it, as long as it asks chunks for their named parameters.

Delete when: finalize_model_grads sums the gradient in every supported release.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from shim.patches._arguments import Function, argument, replacing
from shim.patches.megatron_core._chunk_parameters import Chosen, Named, owners

TARGET = "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads"

METHOD, NORM = "_apply_gated_norm", "out_norm"  # of every layer of the family: the method that uses the norm
# Upstream sums the gradient of each weight of such a name, if the config says so.
NAME, SUMS = "out_norm.q_layernorm.{}", SimpleNamespace(qk_layernorm=True, sequence_parallel=False)


def _allreduce(original: Function) -> Function:
    model_of, config_of = argument(original, "model"), argument(original, "config")
    with_model, with_config = replacing(original, "model"), replacing(original, "config")

    @functools.wraps(original)
    def _allreduce_non_tensor_model_parallel_grads(*args: Any, **kwargs: Any) -> Any:
        config = config_of(args, kwargs)
        unsummed: dict[int, Any] = {}  # by the number of the chunk, in case upstream walks over one twice
        chunks = model_of(args, kwargs)
        watched = [_watched(number, chunk, config, unsummed) for number, chunk in enumerate(chunks)]
        given, named = with_model(args, kwargs, watched)
        result = original(*given, **named)
        if unsummed:
            args, kwargs = with_model(args, kwargs, list(unsummed.values()))
            args, kwargs = with_config(args, kwargs, SUMS)
            original(*args, **kwargs)
        return result

    return _allreduce_non_tensor_model_parallel_grads


def _watched(number: int, chunk: Any, config: Any, unsummed: dict[int, Any]) -> Chosen:
    """What stands for the chunk, and adds to `unsummed` what stands for its output norms that are still to be summed.

    It does so in upstream's walk over the parameters, which there is only if ranks have anything to sum.
    """

    def choose(named: Named) -> Named:
        weights = [weight for name, weight in named if NORM in name and _is_unsummed(chunk, name, weight, config)]
        if weights:
            norms = [(NAME.format(place), weight) for place, weight in enumerate(weights)]
            unsummed[number] = SimpleNamespace(ddp_config=chunk.ddp_config, named_parameters=lambda: norms)
        return named

    return Chosen(chunk, choose)


def _is_unsummed(chunk: Any, name: str, weight: Any, config: Any) -> bool:
    summed = config.sequence_parallel and getattr(weight, "sequence_parallel", False)
    averaged = getattr(weight, "average_gradients_across_tp_domain", False)
    if summed or averaged or getattr(weight, "tensor_model_parallel", False):
        return False
    # A trainer's own layer may have the method, and none of the attributes.
    modules = owners(chunk, name, weight, NORM)
    return any(hasattr(type(module), METHOD) and getattr(module, "tp_size", 1) != 1 for module in modules)


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {TARGET: _allreduce}
