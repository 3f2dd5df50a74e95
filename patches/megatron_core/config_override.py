"""shim.config_override in the recompute of what ran inside of it: megatron-core's checkpoints.

What is missing (0.12 to 0.19): a trainer that sets a field of a config around a call, and sets it back, has the call
recomputed in backward with the old value: the gradient is silently that of another function.

The patch wraps the function that a checkpoint runs again, so that a recompute sees the values of shim.config_override
that its forward pass saw. Nothing changes where none is entered.

Covered: tensor_parallel.checkpoint, and all that calls it or CheckpointFunction; CheckpointWithoutOutput. te_checkpoint
is covered by te-config-override.

Upstream: nothing of the kind. Delete with shim.config_override.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim._config_override import carrying_checkpoint
from shim.patches._arguments import Function

RANDOM = "megatron.core.tensor_parallel.random:"

# The function to run again comes behind the context of autograd, and behind the instance.
BINDINGS: dict[str, Callable[[Function], Function]] = dict.fromkeys(
    (RANDOM + "CheckpointFunction.forward", RANDOM + "CheckpointWithoutOutput.checkpoint"),
    functools.partial(carrying_checkpoint, position=1),
)


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """The factories of the variant: target -> function from upstream's object to the one that takes its place."""
    return BINDINGS
