"""Adam's step, in checkpoints of the distributed optimizer, of parameter groups that are empty on a rank.

What is wrong: FusedAdam of Transformer Engine (up to 2.18) and of Apex counts steps in its parameter groups, and skips
a group that has no parameter on this rank. Such is the group without weight decay on a rank whose shard of the buffer
has no norm and no bias.

1. (0.12 and 0.13) Data-parallel rank 0 saves the groups of all. If one is empty there, it has no step, or that of
   the last resume. After a resume Adam begins at step 1 in this group: with moments of many steps, the update is
   wrong until the bias corrections have faded, thousands of steps for the second moment.
2. (0.12 to 0.20) A checkpoint that was saved so. From 0.14 on a rank with both groups raises "steps: [1, 21]" when it
   saves the next one. Several chained optimizers, as with experts, take the step of the others there.

The patch: a group that is empty on this rank is saved with the step of the others, if they all have the same. When a
checkpoint is loaded in which a group has no step, and all others the same, it gets that step, and a warning says so.
Weights of a distributed optimizer are trained from the first step on, so that all groups have the same. If the steps
of a checkpoint differ, a warning names them, and nothing is changed: none of them need be right.

Optimizers of torch keep the step with each weight, and the CPU-offloaded optimizer has its own way. Both stay as they
are, and so does the optimizer that is not distributed.

Upstream: megatron-core 0.14 saves one step for all groups. Transformer Engine 2.19 counts in empty groups (pull request
3318), so that nothing is damaged with it. Neither repairs a damaged checkpoint of a single optimizer.

Delete when: megatron-core 0.13 is not supported, and nobody resumes from its checkpoints.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing

DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer."
log = logging.getLogger("shim")

Group = Mapping[str, Any]


def _steps(groups: Iterable[Group]) -> set[int]:
    """The different steps of the groups that have one. Tensors, which only a GPU knows, do not count."""
    return {group["step"] for group in groups if isinstance(group.get("step"), int)}


def _state_dict(original: Function) -> Function:
    @functools.wraps(original)
    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = original(self, *args, **kwargs)
        groups = self.optimizer.param_groups
        steps = _steps(group for group in groups if group["params"])
        if len(steps) == 1 and not hasattr(self.optimizer, "sub_optimizers"):
            (step,) = steps
            for group, saved in zip(groups, state["optimizer"]["param_groups"], strict=True):
                if not group["params"]:
                    saved["step"] = step
        return state

    return state_dict


def _load_state_dict(original: Function) -> Function:
    state_of, with_state = argument(original, "state_dict"), replacing(original, "state_dict")

    @functools.wraps(original)
    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        state = state_of(args, kwargs)
        groups = state.get("optimizer", {}).get("param_groups", ())  # Megatron-FSDP has another state
        steps = _steps(groups)
        if len(steps) > 1:
            log.warning(
                f"fused-adam-step: the parameter groups of this checkpoint have the steps {sorted(steps)} of Adam, and "
                "should have one. A stock release has damaged it. Nothing is changed: what is right is not in the file"
            )
        missing = [group for group in groups if group.get("step") is None]
        if len(steps) == 1 and missing:
            (step,) = steps
            log.warning(
                f"fused-adam-step: {len(missing)} parameter groups of this checkpoint have no step, since they were "
                f"empty on the rank that saved it. They go on with that of the others, {step}"
            )
            fixed = [{**group, "step": step} if group.get("step") is None else group for group in groups]
            inner = {**state["optimizer"], "param_groups": fixed}
            args, kwargs = with_state(args, kwargs, {**state, "optimizer": inner})
        return original(*args, **kwargs)

    return load_state_dict


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    found = {DISTRIBUTED + "load_state_dict": _load_state_dict}
    return {DISTRIBUTED + "state_dict": _state_dict, **found} if variant == "v0_12" else found
