"""Defect 8: torch's Adam without Transformer Engine and Apex, before its first step, or without a weight on this rank.

DistributedOptimizer.state_dict asks all states for their one step, and raises if there are none. So for the call that
needs it one more entry stands among the states, with the step zero. No weight has it, and it is gone after the call.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from shim.patches._arguments import Function, argument

MODULE = "megatron.core.optimizer.distrib_optimizer"
KEY = "cpu-offloaded-optimizer: the step of an optimizer without states"


def patch_sharded_state_dict(original: Function) -> Function:
    loading_of = argument(original, "is_loading")

    @functools.wraps(original)
    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        optimizer = args[0]
        if not _lacks_a_step(optimizer):
            return original(*args, **kwargs)
        if not any(group["params"] for group in optimizer.optimizer.param_groups):
            with _step_of_zero(optimizer.optimizer):  # no step is asked for in what other ranks save
                return original(*args, **kwargs)
        if loading_of(args, kwargs):
            with _step_of_zero(optimizer.optimizer):
                state = optimizer.state_dict()
            optimizer.load_state_dict(state)  # makes the states that are to be filled, as upstream is about to do
        return original(*args, **kwargs)

    return sharded_state_dict


def _lacks_a_step(optimizer: Any) -> bool:
    """Whether upstream will look for a step in states that are not there. Megatron-FSDP has its own states."""
    if getattr(sys.modules[MODULE], "HAVE_APEX_OR_TE", True):
        return False
    config, inner = optimizer.ddp_config, optimizer.optimizer
    fsdp = getattr(config, "use_custom_fsdp", False) or getattr(config, "use_megatron_fsdp", False)
    return inner is not None and not inner.state and not fsdp


@contextlib.contextmanager
def _step_of_zero(inner: Any) -> Iterator[None]:
    inner.state[KEY] = {"step": torch.zeros(())}
    try:
        yield
    finally:
        inner.state.pop(KEY, None)
