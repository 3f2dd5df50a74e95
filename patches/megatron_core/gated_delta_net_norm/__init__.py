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

Not covered: a trainer with another function in the place of _allreduce_non_tensor_model_parallel_grads, as slime has.
The report says "conflict" then.

Delete when: finalize_model_grads sums the gradient in every supported release.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from shim.patches._arguments import Function, argument, replacing

TARGET = "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads"

NORMS = "_apply_gated_norm"  # the method of every layer of the family that uses out_norm
# Upstream sums the gradient of each weight of such a name, if the config says so.
NAME, SUMS = "out_norm.q_layernorm.{}", SimpleNamespace(qk_layernorm=True, sequence_parallel=False)


def _allreduce(original: Function) -> Function:
    model_of, config_of = argument(original, "model"), argument(original, "config")
    with_model, with_config = replacing(original, "model"), replacing(original, "config")

    @functools.wraps(original)
    def _allreduce_non_tensor_model_parallel_grads(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        norms = [_norms(chunk, config_of(args, kwargs)) for chunk in model_of(args, kwargs)]
        norms = [chunk for chunk in norms if chunk is not None]
        if norms:
            args, kwargs = with_model(args, kwargs, norms)
            args, kwargs = with_config(args, kwargs, SUMS)
            original(*args, **kwargs)
        return result

    return _allreduce_non_tensor_model_parallel_grads


def _norms(chunk: Any, config: Any) -> Any:
    """What stands for a chunk with nothing but its output norms whose gradients are still to be summed, or None."""
    weights = {NAME.format(number): weight for number, weight in enumerate(_unsummed(chunk, config))}
    if not weights:
        return None
    return SimpleNamespace(ddp_config=chunk.ddp_config, named_parameters=weights.items)


def _unsummed(chunk: Any, config: Any) -> Iterator[Any]:
    for module in chunk.modules():
        # A trainer's own layer may have the method, and none of the attributes.
        if not hasattr(type(module), NORMS) or getattr(module, "tp_size", 1) == 1 or not hasattr(module, "out_norm"):
            continue
        for weight in module.out_norm.parameters():
            summed = config.sequence_parallel and getattr(weight, "sequence_parallel", False)
            averaged = getattr(weight, "average_gradients_across_tp_domain", False)
            if not summed and not averaged and not getattr(weight, "tensor_model_parallel", False):
                yield weight


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {TARGET: _allreduce}
