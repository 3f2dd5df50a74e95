"""The end of a step: lost tensors are an error before gradients are used, or the runner repeats the step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from shim.patches._arguments import Function
from shim.patches.megatron_core.paged_stash.experts import ExpertStash


def patch_finalize(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def finalize_model_grads(*args: Any, **kwargs: Any) -> Any:
        stash.step_ends()
        return original(*args, **kwargs)

    return finalize_model_grads


def patch_graph(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        stash.step_ends()  # a replayed graph calls no hook
        return result

    return __call__


def patch_runner(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer, stash.random_state = stash.random_state, _random_state()
        stash.runners += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            stash.runners -= 1
            stash.random_state, stash.rerunning = outer, False

    return __call__


def patch_prepare_for_rerun(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def prepare_for_rerun(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        stash.forget_overflow()
        stash.rerunning = True  # for all layers, also those with a separate config
        if stash.random_state is not None:
            stash.random_state()
        return result

    return prepare_for_rerun


def _random_state() -> Callable[[], None]:
    """Save the state of all random generators. Returns a function that restores it.

    States are copied. Generators of CUDA graphs stay the same objects, because the graphs reference them.
    """
    from megatron.core.tensor_parallel import random

    cpu = torch.get_rng_state()
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    tracked = {
        name: (state, state.get_state() if isinstance(state, torch.Generator) else state.clone())
        for name, state in random.get_cuda_rng_tracker().get_states().items()
    }

    def restore() -> None:
        torch.set_rng_state(cpu)
        if device is not None:
            torch.cuda.set_rng_state(device)
        for state, value in tracked.values():
            if isinstance(state, torch.Generator):
                state.set_state(value)
        states = {n: state if isinstance(state, torch.Generator) else value for n, (state, value) in tracked.items()}
        random.get_cuda_rng_tracker().set_states(states)

    return restore
