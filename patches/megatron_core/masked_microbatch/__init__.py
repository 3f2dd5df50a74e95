"""Microbatches whose tokens are all masked.

What is wrong (0.12 to 0.14): a loss function may return the sum of its losses, the number of its tokens, and values to
log. Without calculate_per_token_loss the schedules divide the first by the second. If the loss mask of a microbatch
is zero everywhere, that is 0 / 0. The loss is NaN, and so is the gradient of every weight after this step. In a trainer
without a check for NaN, the weights are lost.

The patch hands the schedules a count of one instead of zero. The loss of such a microbatch is then zero, and so is its
gradient. The number of microbatches, by which the schedules also divide, stays: the gradient is that of the other
microbatches, scaled as ever. The count that the schedules add up stays zero. Every other count keeps its value.

Upstream: 0.15 divides by max(count, 1), by commit 1aef9f8eff.

Not covered: loss functions that return two values have divided by themselves. The loss of multi-token prediction is
divided elsewhere, which mtp-packed-sequences fixes.

Delete when: megatron-core 0.14 is not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function, argument, replacing

SCHEDULES = "megatron.core.pipeline_parallel.schedules:"


def _forward_step(original: Function) -> Function:
    step_of, put_step = argument(original, "forward_step_func"), replacing(original, "forward_step_func")
    config_of = argument(original, "config")

    @functools.wraps(original)
    def forward_step(*args: Any, **kwargs: Any) -> Any:
        step, config, counts = step_of(args, kwargs), config_of(args, kwargs), _Counts()

        def with_dividing_loss(*given: Any, **named: Any) -> tuple[Any, Any]:
            output, loss_func = step(*given, **named)
            return output, counts.at_least_one(loss_func, config)

        args, kwargs = put_step(args, kwargs, with_dividing_loss)
        return counts.restored(original(*args, **kwargs))

    return forward_step


def _forward_step_calc_loss(original: Function) -> Function:
    loss_of, put_loss = argument(original, "loss_func"), replacing(original, "loss_func")
    config_of = argument(original, "config")

    @functools.wraps(original)
    def forward_step_calc_loss(*args: Any, **kwargs: Any) -> Any:
        counts = _Counts()
        loss_func = counts.at_least_one(loss_of(args, kwargs), config_of(args, kwargs))
        args, kwargs = put_loss(args, kwargs, loss_func)
        return counts.restored(original(*args, **kwargs))

    return forward_step_calc_loss


class _Counts:
    """The number of tokens of one microbatch, as its loss function returned it, if upstream divides by it."""

    def __init__(self) -> None:
        self._given: list[Any] = []

    def at_least_one(self, loss_func: Function, config: Any) -> Function:
        """loss_func, with a count of at least one where upstream divides by it."""

        def dividing(*args: Any, **kwargs: Any) -> Any:
            outputs = loss_func(*args, **kwargs)
            # Outputs that are no loss are handed on as they are, whatever they are.
            if kwargs.get("non_loss_data") or len(outputs) != 3 or config.calculate_per_token_loss:
                return outputs
            loss, count, logged = outputs
            self._given.append(count)
            # No look at the value: the device need not be waited for.
            return loss, torch.clamp(count, min=1) if isinstance(count, torch.Tensor) else max(count, 1), logged

        return dividing

    def restored(self, result: Any) -> Any:
        """The result of upstream's function, (outputs, count), with the count that the loss function returned."""
        if not self._given:
            return result
        outputs, _ = result
        return outputs, self._given[-1]


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    if variant == "v0_12":
        return {SCHEDULES + "forward_step": _forward_step}
    return {SCHEDULES + "forward_step_calc_loss": _forward_step_calc_loss}
