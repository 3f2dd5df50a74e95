"""The gradient of a router's own losses (auxiliary loss, z-loss) over tensor- and context-parallel ranks.

What is wrong (0.12 to 0.19): the gradient of these losses should not depend on how a row is cut over ranks. It does, in
three ways:

- Under context parallelism it is too small by the number of ranks (0.12 to 0.15). Gradients are averaged over
  context-parallel ranks, and the loss of tokens is multiplied by their number before; these losses are not.
- With calculate_per_token_loss it is too small by the number of tensor- and context-parallel ranks (0.12 to 0.18). The
  losses are multiplied by the tokens of a rank, and the gradient is divided by the tokens of all.
- With calculate_per_token_loss and a padding mask, the auxiliary loss is multiplied by the tokens of the group instead
  (0.16 to 0.19): the sum over ranks overwrites the count of the rank before it is read. From 0.16 to 0.18 this cancels
  the defect before. 0.19 fixes that one alone, and the gradient is too large by the number of ranks. The global
  auxiliary loss is too large by the number of data-parallel ranks from 0.16 on.

So a run on two ranks balances its experts half as hard as the same run on one, or twice as hard.

The patch multiplies the scale that forward_step sets for these losses by what is missing, and gives the auxiliary loss
the tokens of a rank: those of the group, divided by its ranks. Excluding it drops both fixes. It costs two
operations on one number in a microbatch, and one in a layer that gets a padding mask. Logged values do not change.
Nothing happens on one rank, nor in a model without experts.

Left alone:

- How the global auxiliary loss depends on data-parallel ranks. Its gradient is divided by their number although the
  loss is a sum over them (Megatron-LM issue 3672, open). With the patch it is the same with and without a padding mask
  and calculate_per_token_loss.
- Without calculate_per_token_loss, the z-loss is the mean over ranks of their means, also if a mask leaves them with
  different numbers of tokens. `z-loss-padding` is about that.
- The z-loss of 0.12's dispatcher alltoall_seq with calculate_per_token_loss: its auxiliary loss is right, and the
  z-loss is too small by the number of tensor-parallel ranks.

Upstream: pull request 2217 (in 0.16) and 5047 (in 0.19) fix the first two; 7481 is open for the third.

Delete when: the oldest supported release has all three pull requests.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
FORWARD_STEP, CALC_LOSS = f"{SCHEDULES}:forward_step", f"{SCHEDULES}:forward_step_calc_loss"
COUNTS = "megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count"


def _scaled(original: Function, mean_lacks_cp: bool) -> Function:
    """A factory for the function that sets the scale of these losses, once for each microbatch.

    mean_lacks_cp: whether the scale lacks the context-parallel ranks without calculate_per_token_loss.
    """
    config_of = argument(original, "config")

    @functools.wraps(original)
    def forward_step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        config = config_of(args, kwargs)
        if getattr(config, "num_moe_experts", None) is not None:
            lacking = _lacking(config, mean_lacks_cp)
            if lacking > 1:
                scaler = sys.modules[SCHEDULES].MoEAuxLossAutoScaler
                scaler.set_loss_scale(scaler.main_loss_backward_scale * lacking)
        return result

    return forward_step


def _lacking(config: Any, mean_lacks_cp: bool) -> int:
    """By how much the scale is too small."""
    ranks: int = config.context_parallel_size
    if not config.calculate_per_token_loss:
        return ranks if mean_lacks_cp else 1
    # This dispatcher gathers the tokens of all tensor-parallel ranks before they are counted.
    gathered = getattr(config, "moe_token_dispatcher_type", None) == "alltoall_seq"
    return ranks if gathered else ranks * config.tensor_model_parallel_size


def _counts(original: Function) -> Function:
    group_of, masked = argument(original, "reduce_group"), argument(original, "with_padding_mask")

    @functools.wraps(original)
    def get_tokens_per_expert_and_token_count(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if not masked(args, kwargs):
            return found
        per_expert, local, total = found
        ranks = group_of(args, kwargs).size()
        # Not the rank's own count: the losses of all ranks add up to one, which has the weight of all tokens.
        return per_expert, total / ranks if ranks > 1 else local, total

    return get_tokens_per_expert_and_token_count


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    if variant == "v0_19":
        return {COUNTS: _counts}
    scaled = functools.partial(_scaled, mean_lacks_cp=variant != "v0_16")
    if variant == "v0_16":
        return {CALC_LOSS: scaled, COUNTS: _counts}
    return {FORWARD_STEP if variant == "v0_12" else CALC_LOSS: scaled}
