"""The state of an optimizer that Megatron-FSDP shards.

What is wrong (0.17 to 0.19): `fully_shard_optimizer`, which `fully_shard` also calls, takes a real step on gradients of
zero, so that there is a state to load a checkpoint into.
- Weight decay changes the weights: by the factor 1 - lr * weight_decay if it is decoupled, and by up to a learning rate
  with Adam's other kind, whose moments keep it too.
- Adam counts the step, so the bias correction of the training begins at its second step.
- The moments of an optimizer that has a state already decay once more.

What the patch does: that step runs without learning rate and weight decay, and its count goes back to zero. A state
that was there is put aside for it. Settings of the groups come back as they were, also if the function raises. It does
not fix optimizers of torch whose fresh state is another than that of an empty step: NAdam, Rprop and ASGD.

Upstream: fixed on main by pull request 5976, in the same way; a state that was there is not kept.

Delete when: releases before 0.20 are not supported.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shim.patches._arguments import Function, argument

TARGET = "megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard:fully_shard_optimizer"

STEP = "step"  # of a group or of a parameter's state, by optimizer


def _fully_shard_optimizer(original: Function) -> Function:
    optimizer_of = argument(original, "optimizer")

    @functools.wraps(original)
    def fully_shard_optimizer(*args: Any, **kwargs: Any) -> Any:
        with _steps_without_effect(optimizer_of(args, kwargs)):
            return original(*args, **kwargs)

    return fully_shard_optimizer


@contextmanager
def _steps_without_effect(optimizer: Any) -> Iterator[None]:
    """A step on gradients of zero makes the state of parameters that have none, and changes nothing else."""
    groups, had = optimizer.param_groups, optimizer.state
    settings = [{key: group[key] for key in ("lr", "weight_decay", STEP) if key in group} for group in groups]
    for group in groups:
        group.update({key: _zero(group[key]) for key in ("lr", "weight_decay") if key in group})
    made: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    optimizer.state = made
    try:
        yield
        for each in (*groups, *made.values()):
            if STEP in each:
                each[STEP] = _zero(each[STEP])
    finally:
        for group, kept in zip(groups, settings, strict=True):
            group.update(kept)
        optimizer.state = had
        had.update({weight: state for weight, state in made.items() if weight not in had})


def _zero(value: Any) -> Any:
    """Of the same kind: a tensor on its device, an int or a float."""
    return value * 0


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {TARGET: _fully_shard_optimizer}
