"""shim.config_override in a recompute by Transformer Engine's checkpoint.

What is missing (2.1 to 2.20.2): see config-override, which does the same for megatron-core's own checkpoints. Under FP8
and FP4 megatron-core uses this checkpoint (te_checkpoint).

The patch marks this release's checkpoint for shim.config_override: it keeps the recomputed function in the place that
shim.config_override reads. The patch changes nothing else.

revert() ends no entered override (see config-override).

Upstream: nothing like it.

Delete when: shim.config_override is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shim._config_override.recompute import entered, marked
from shim._resources import Bindings, Resource
from shim.patches._arguments import Function

CHECKPOINT = "transformer_engine.pytorch.distributed:checkpoint"


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return Bindings({CHECKPOINT: marked}, Resource(entered))
