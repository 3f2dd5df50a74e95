"""`offload_to_cpu()` and `restore_from_cpu()` of megatron-core's optimizers.

What is wrong (0.15 to 0.20):
1. The distributed optimizer steps on shards that are views of DDP's buffer of weights: with
   use_precision_aware_optimizer all of them, and else those of weights in fp32. `offload_to_cpu` copies them to the
   host, which frees nothing, and `restore_from_cpu` gives them memory of their own. With a precision-aware optimizer
   nobody copies from there to the buffer, so every later step changes no weight of the model, in silence.
2. 0.15 does not import logging, which both methods use: NameError.

What the patch does: such shards keep the memory that they have. Copies in fp32 and states move as on stock. A module
that lacks the name gets logging.

Upstream: open, not reported.

Delete when: all supported releases leave views of DDP's buffer where they are.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function

MODULE = "megatron.core.optimizer.optimizer"
SHARDS = ("shard_float16_groups", "shard_fp32_groups")


def _offload_to_cpu(original: Function) -> Function:
    @functools.wraps(original)
    def offload_to_cpu(*args: Any, **kwargs: Any) -> Any:
        groups = [group for name in SHARDS for group in getattr(args[0], name, None) or []]
        views = [(shard, shard.data) for group in groups for shard in group if shard is not None]
        result = original(*args, **kwargs)
        for shard, data in views:
            shard.data = data
        return result

    return offload_to_cpu


def _logging(original: Any) -> Any:
    return original if hasattr(original, "INFO") else logging


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Any], Any]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {f"{MODULE}:MegatronOptimizer.offload_to_cpu": _offload_to_cpu, f"{MODULE}:logging": _logging}
