"""Loss functions that count the tokens of their rank, under context parallelism, as an option.

What is wrong (0.12 to 0.20): a loss function may return the sum of its losses, the number of its tokens, and values to
log. Without calculate_per_token_loss the schedules divide the first by the second. Under context parallelism (CP) a
rank has a part of each sequence, and gradients are averaged over these ranks. So if a loss mask leaves the ranks
different numbers of tokens, the tokens of a rank with few of them count more. A sequence with one token on two ranks
has half its gradient.

Releases expect different counts: from 0.13 on that of all ranks of the CP group, divided by their number; 0.12, which
multiplies by their number, that of all. Few loss functions return it. pretrain_gpt of Megatron-LM sums over the group
in 0.12, and returns the count of its rank from 0.13 on.

The patch does nothing until the option `sum_over_cp` is true. Then a loss function returns the sum and the count of its
own rank, on every release. The count is summed over the CP group, and the loss is divided by the sum. From 0.13 on the
loss is multiplied by the size of the group before, in place, as upstream does with the loss of two values. A
logged loss in the same storage then has the right mean over ranks. The count that the schedules add up stays
the rank's own. It costs a message of one number in each microbatch, and no wait of the host.

A trainer that already sums counts over the CP group must leave the option off.

Nothing happens with calculate_per_token_loss, for a loss function of two values, on one CP rank, or for outputs that
are no loss. The loss of multi-token prediction is divided elsewhere.

Upstream: open (Megatron-LM pull request 7513).

Delete when: the supported releases sum the count over the context-parallel group.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim._errors import ShimError
from shim.patches._arguments import Function, argument, replacing

SCHEDULES = "megatron.core.pipeline_parallel.schedules:"
FORWARD_STEP, CALC_LOSS = SCHEDULES + "forward_step", SCHEDULES + "forward_step_calc_loss"
STATE = "megatron.core.parallel_state"


class _Counts:
    """The number of tokens of one microbatch, as its loss function returned it, if upstream divides by it.

    given_size: the CP ranks that the schedule was called for, None where it does not say.
    multiplied: whether upstream multiplies the loss by the CP ranks.
    """

    def __init__(self, config: Any, model: Any, given_size: int | None, multiplied: bool) -> None:
        self._config = config
        self._model = model
        self._given_size = given_size
        self._multiplied = multiplied
        self._own: list[Any] = []

    def summed(self, loss_func: Function | None) -> Function | None:
        """loss_func, with the count of all ranks of the CP group where upstream divides by it."""
        if loss_func is None:  # 0.16 on: the output is what is wanted
            return None

        def summing(*args: Any, **kwargs: Any) -> Any:
            outputs = loss_func(*args, **kwargs)
            # Outputs that are no loss are handed on as they are, whatever they are.
            if kwargs.get("non_loss_data") or len(outputs) != 3 or self._config.calculate_per_token_loss:
                return outputs
            group = self._group()
            if group.size() == 1:
                return outputs
            loss, count, logged = outputs
            self._own.append(count)
            total = torch.as_tensor(count, device=loss.device).detach().clone()
            torch.distributed.all_reduce(total, group=group)
            if not self._multiplied:
                loss *= group.size()
            return loss, total, logged

        return summing

    def _group(self) -> Any:
        """The CP group of the model, or else parallel_state's."""
        model = self._model
        while model is not None and getattr(model, "cp_group", None) is None:
            model = getattr(model, "module", None)
        state: Any = sys.modules[STATE]
        group = state.get_context_parallel_group() if model is None else model.cp_group
        if self._given_size not in (None, group.size()):
            raise ShimError(
                f"loss-token-count: the schedule runs a microbatch on {self._given_size} context-parallel ranks, and "
                f"the model's group has {group.size()}. The count of tokens would be summed over other ranks than "
                f"those that share the sequence. Set calculate_per_token_loss, or switch the option sum_over_cp off."
            )
        return group

    def restored(self, result: Any) -> Any:
        """The result of upstream's function, (outputs, count), with the count that the loss function returned."""
        if not self._own:
            return result
        outputs, _ = result
        return outputs, self._own[-1]


def _forward_step(original: Function, sums: bool, multiplied: bool) -> Function:
    """0.12, 0.13: the function runs the model, too, and gets the loss function with its output."""
    step_of, put_step = argument(original, "forward_step_func"), replacing(original, "forward_step_func")
    config_of, model_of = argument(original, "config"), argument(original, "model")

    @functools.wraps(original)
    def forward_step(*args: Any, **kwargs: Any) -> Any:
        if not sums:
            return original(*args, **kwargs)
        step, counts = step_of(args, kwargs), _Counts(config_of(args, kwargs), model_of(args, kwargs), None, multiplied)

        def with_summing_loss(*given: Any, **named: Any) -> tuple[Any, Any]:
            output, loss_func = step(*given, **named)
            return output, counts.summed(loss_func)

        args, kwargs = put_step(args, kwargs, with_summing_loss)
        return counts.restored(original(*args, **kwargs))

    return forward_step


def _forward_step_calc_loss(original: Function, sums: bool) -> Function:
    loss_of, put_loss = argument(original, "loss_func"), replacing(original, "loss_func")
    config_of, model_of = argument(original, "config"), argument(original, "model")
    size_of = argument(original, "cp_group_size")

    @functools.wraps(original)
    def forward_step_calc_loss(*args: Any, **kwargs: Any) -> Any:
        if not sums:
            return original(*args, **kwargs)
        size = size_of(args, kwargs)
        counts = _Counts(config_of(args, kwargs), model_of(args, kwargs), size, multiplied=False)
        args, kwargs = put_loss(args, kwargs, counts.summed(loss_of(args, kwargs)))
        return counts.restored(original(*args, **kwargs))

    return forward_step_calc_loss


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    sums = options["sum_over_cp"]
    if variant in ("v0_14", "v0_15"):
        return {CALC_LOSS: functools.partial(_forward_step_calc_loss, sums=sums)}
    multiplied = variant == "v0_12"
    return {FORWARD_STEP: functools.partial(_forward_step, sums=sums, multiplied=multiplied)}
