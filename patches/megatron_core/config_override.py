"""shim.config_override in the recompute of what ran inside of it: megatron-core's checkpoints.

What is missing (0.12 to 0.19): a trainer that sets a field of a config around a call, and sets it back, has the call
recomputed in backward with the old value: the gradient is silently that of another function.

The patch says that this release's checkpoints keep the function that they run again where shim.config_override looks
for it (shim/_config_override/recompute.py), which the fingerprints have shown, and changes nothing. While an override
is entered, and only then, a checkpoint keeps its function together with the values of that moment.

Covered: tensor_parallel.checkpoint, and all that calls it or CheckpointFunction; CheckpointWithoutOutput. te_checkpoint
is covered by te-config-override.

revert() ends no override that is entered, because it is its caller's: its fields and checkpoints stay as they are
until it is left, and status() says that there is one.

Upstream: nothing of the kind. Delete with shim.config_override.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shim._config_override.recompute import entered, marked
from shim._kept import Bindings, Kept
from shim.patches._arguments import Function

RANDOM = "megatron.core.tensor_parallel.random:"

BINDINGS: dict[str, Callable[[Function], Function]] = dict.fromkeys(
    (RANDOM + "CheckpointFunction.forward", RANDOM + "CheckpointWithoutOutput.checkpoint"), marked
)


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """The factories of the variant: target -> function from upstream's object to the one that takes its place."""
    return Bindings(BINDINGS, Kept(entered))
