"""shim.config_override in the recompute of what ran inside of it: the checkpoint of Transformer Engine.

What is missing (2.1 to 2.20.2): see config-override, which does the same for megatron-core's own checkpoints. Under FP8
and FP4 megatron-core takes this one (te_checkpoint).

The patch says that this release keeps the function where shim.config_override looks for it, and changes nothing.

revert() ends no override that is entered (see config-override).

Upstream: nothing of the kind. Delete with shim.config_override.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shim._config_override.recompute import entered, marked
from shim._kept import Bindings, Kept
from shim.patches._arguments import Function

CHECKPOINT = "transformer_engine.pytorch.distributed:checkpoint"


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """The factories of the variant: target -> function from upstream's object to the one that takes its place."""
    return Bindings({CHECKPOINT: marked}, Kept(entered))
