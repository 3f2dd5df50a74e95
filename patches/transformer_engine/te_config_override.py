"""shim.config_override in the recompute of what ran inside of it: the checkpoint of Transformer Engine.

What is missing (2.1 to 2.20.2): see config-override, which does the same for megatron-core's own checkpoints. Under FP8
and FP4 megatron-core takes this one (te_checkpoint).

The patch wraps the function that the checkpoint runs again. A module stays what it is, because the checkpoint looks
into it, unless a field is overridden while it is entered.

Upstream: nothing of the kind. Delete with shim.config_override.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim._config_override import carrying_checkpoint, overridden
from shim.patches._arguments import Function

CHECKPOINT = "transformer_engine.pytorch.distributed:checkpoint"


def _checkpoint(original: Function) -> Function:
    carried = carrying_checkpoint(original, position=0)

    @functools.wraps(carried)
    def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(function, torch.nn.Module) and not overridden():
            return original(function, *args, **kwargs)
        return carried(function, *args, **kwargs)

    return checkpoint


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """The factories of the variant: target -> function from upstream's object to the one that takes its place."""
    return {CHECKPOINT: _checkpoint}
