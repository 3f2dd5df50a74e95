"""Checkpoints of the distributed optimizer with weights in fp32.

What is wrong (0.15 to 0.20): with `distrib_optim_sharding_type` "dp_reshardable", which Megatron-LM's own training
takes, a checkpoint cannot be loaded if a weight is in fp32, also if most are in bf16. The main weight is a view of
such a weight, which requires a gradient, and `load_parameter_state_from_dp_reshardable` copies into it: a RuntimeError,
"a view of a leaf Variable that requires grad is being used in an in-place operation". The functions that load the other
formats record no gradients.

What the patch does: this function also records no gradients. Weights in bf16 and fp16 have separate main weights, which
are loaded as before.

Upstream: fixed on the dev branch by commit b6e06e5c4d, and not on main.

Delete when: the function records no gradients upstream, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function

LOAD = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_parameter_state_from_dp_reshardable"


def _load_parameter_state_from_dp_reshardable(original: Function) -> Function:
    @functools.wraps(original)
    def load_parameter_state_from_dp_reshardable(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return original(*args, **kwargs)

    return load_parameter_state_from_dp_reshardable


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {LOAD: _load_parameter_state_from_dp_reshardable}
