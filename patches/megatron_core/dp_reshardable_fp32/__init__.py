"""Checkpoints of the distributed optimizer with weights in fp32.

What is wrong (0.12 to 0.20): a checkpoint cannot be loaded if a weight is in fp32, also if most are in bf16. The main
weight is a view of such a weight, which requires a gradient, and loading copies into it: a RuntimeError, "a view of a
leaf Variable that requires grad is being used in an in-place operation". It is so in two formats:
- `distrib_optim_sharding_type` "dp_reshardable", which Megatron-LM's own training takes from 0.15 on (before that
  "fully_sharded_bucket_space").
- `load_parameter_state`, the file beside a checkpoint of `--ckpt-format torch`.
The functions that load the other formats record no gradients.

What the patch does: the method that sets a weight and its states, which all formats call, records no gradients. Weights
in bf16 and fp16 have separate main weights, which are loaded as before.

Upstream: fixed for dp_reshardable on the dev branch by commit b6e06e5c4d, and not on main.

Delete when: no format records gradients upstream, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function

SET = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states"


def _set_states(original: Function) -> Function:
    @functools.wraps(original)
    def _set_main_param_and_optimizer_states(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return original(*args, **kwargs)

    return _set_main_param_and_optimizer_states


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {SET: _set_states}
