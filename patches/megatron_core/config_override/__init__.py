"""shim.config_override in a recompute by megatron-core's checkpoints.

What is missing (0.12 to 0.20): a trainer sets a field of a config around a call and then restores it. Backward
recomputes the call with the restored value, so the gradient is silently that of another function.

The patch marks this release's checkpoints for shim.config_override: they keep the recomputed function in the
place that shim/_config_override/recompute.py reads, as the fingerprints prove. The patch changes nothing else. While an
override is entered, and only then, a checkpoint keeps its function together with the values of that moment.

Covered: tensor_parallel.checkpoint, all callers of it or of CheckpointFunction, and CheckpointWithoutOutput.
te-config-override covers te_checkpoint.

revert() ends no entered override, because the override belongs to its caller. Fields and checkpoints stay as they are
until the caller leaves it, and status() names it.

Upstream: nothing like it.

Delete when: shim.config_override is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shim._config_override.recompute import entered, marked
from shim._resources import Bindings, Resource
from shim.patches._arguments import Function

RANDOM = "megatron.core.tensor_parallel.random:"

BINDINGS: dict[str, Callable[[Function], Function]] = dict.fromkeys(
    (RANDOM + "CheckpointFunction.forward", RANDOM + "CheckpointWithoutOutput.checkpoint"), marked
)


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return Bindings(BINDINGS, Resource(entered))
