"""`offload_to_cpu()` and `restore_from_cpu()` of megatron-core's optimizers.

What is wrong (0.15 to 0.20):
1. The distributed optimizer steps on shards that are views of DDP's buffer of weights: with
   use_precision_aware_optimizer all of them, and else those of weights in fp32. `offload_to_cpu` copies them to the
   host, which frees nothing, and `restore_from_cpu` gives them memory of their own. With a precision-aware optimizer
   nobody copies from there to the buffer, so every later step changes no weight of the model, in silence.
2. `restore_from_cpu` moves every state to the device, also what was on the host before: the moments of weights that
   optimizer_cpu_offload keeps there, so that the next step raises, and the step counts of torch's optimizers, which
   then wait for the device at each weight.
3. 0.15 does not import logging, which both methods use: NameError.

What the patch does: such shards keep the memory that they have, and states on the host stay there. Copies in fp32 and
other states move as on stock. A module that lacks the name gets logging.

Upstream: open, not reported.

Delete when: all supported releases leave views of DDP's buffer where they are.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from shim.patches._arguments import Function

MODULE = "megatron.core.optimizer.optimizer"
SHARDS = ("shard_float16_groups", "shard_fp32_groups")


# Optimizer -> its states that were on the host when it was offloaded: (states of a weight, name, state).
_ON_HOST: WeakKeyDictionary[Any, list[tuple[dict[str, Any], str, Tensor]]] = WeakKeyDictionary()


def _offload_to_cpu(original: Function) -> Function:
    @functools.wraps(original)
    def offload_to_cpu(*args: Any, **kwargs: Any) -> Any:
        groups = [group for name in SHARDS for group in getattr(args[0], name, None) or []]
        views = [(shard, shard.data) for group in groups for shard in group if shard is not None]
        on_host = [each for each in _states(args[0]) if not each[2].is_cuda]
        result = original(*args, **kwargs)
        for shard, data in views:
            shard.data = data
        _ON_HOST.setdefault(args[0], on_host)  # a second call finds all of them there
        return result

    return offload_to_cpu


def _restore_from_cpu(original: Function) -> Function:
    @functools.wraps(original)
    def restore_from_cpu(*args: Any, **kwargs: Any) -> Any:
        on_host = [
            (states, name, state) for states, name, state in _ON_HOST.pop(args[0], ()) if states.get(name) is state
        ]
        result = original(*args, **kwargs)
        for states, name, state in on_host:
            states[name] = state
        return result

    return restore_from_cpu


def _states(optimizer: Any) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    for states in getattr(getattr(optimizer, "optimizer", None), "state", {}).values():
        for name, state in states.items():
            if isinstance(state, Tensor):
                yield states, name, state


def _logging(original: Any) -> Any:
    return original if hasattr(original, "INFO") else logging


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Any], Any]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    owner = f"{MODULE}:MegatronOptimizer"
    methods = {f"{owner}.offload_to_cpu": _offload_to_cpu, f"{owner}.restore_from_cpu": _restore_from_cpu}
    return {**methods, f"{MODULE}:logging": _logging}
