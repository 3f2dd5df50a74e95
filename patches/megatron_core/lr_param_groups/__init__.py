"""Parameter groups that differ only in their learning rate, when an optimizer's checkpoint is loaded.

What is wrong (0.16 to 0.18): a checkpoint's parameter groups are matched with those of the optimizer by
`param_group_identifier_keys`: wd_mult, lr_mult, is_expert_parallel, is_decoupled_lr. Since 0.16 groups come from
`config_overrides`, which set max_lr, min_lr, start_wd or end_wd, and nothing sets is_decoupled_lr any more. So groups
that differ in nothing else collide, those of decoupled_lr among them. The checkpoint's last one stands for all.
- The distributed optimizer gives each of them the learning rates of the last, in silence.
- In the others torch raises a ValueError about the size of a group. If the sizes are the same they are wrong as well.

What the patch does: if groups of the checkpoint collide, it also compares max_lr, min_lr, start_wd, end_wd and
optimizer. Groups that are the same in these as well keep their order. A learning rate may change on resume: a group
that is left over goes with the only one that is left over in the checkpoint. If several are left over, a
ParamGroupsError names them. If nothing collides, stock does it all. The file has what stock writes, so it can be
loaded with and without the patch. Megatron-FSDP has its own way, which stays.

Upstream: fixed in 0.19 by pull request 4705, which puts all these fields into the keys, so that a changed learning rate
raises an error there.

Delete when: releases before 0.19 are not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shim._errors import ShimError
from shim.patches._arguments import Function, argument

OPTIMIZER = "megatron.core.optimizer.optimizer"
DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"
FILTER_AND_REORDER = f"{OPTIMIZER}:MegatronOptimizer._filter_and_reorder_param_groups"
LOAD_STATE_DICT = f"{DISTRIBUTED}:DistributedOptimizer.load_state_dict"

FIELDS = ("max_lr", "min_lr", "start_wd", "end_wd", "optimizer")  # what overrides set, beside upstream's keys

Group = Mapping[str, Any]


class ParamGroupsError(ShimError, ValueError):
    """Which group of a checkpoint belongs to which group of the optimizer cannot be told."""


def _filter_and_reorder_param_groups(original: Function) -> Function:
    current_of, saved_of = argument(original, "current_groups"), argument(original, "state_dict_groups")

    @functools.wraps(original)
    def _filter_and_reorder_param_groups(*args: Any, **kwargs: Any) -> Any:
        current, saved = current_of(args, kwargs), saved_of(args, kwargs)
        partners = _partners(current, saved, OPTIMIZER)
        if partners is None:
            return original(*args, **kwargs)
        # One pair at a time has nothing to collide with. The numbers of params go by position, as on stock.
        positions = [group["params"] for group in saved]
        return [
            original([group], [{**partner, "params": params}])[0]
            for group, partner, params in zip(current, partners, positions, strict=False)
        ]

    return _filter_and_reorder_param_groups


def _load_state_dict(original: Function) -> Function:
    state_of = argument(original, "state_dict")

    @functools.wraps(original)
    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        optimizer, state = args[0], state_of(args, kwargs)
        inner = getattr(optimizer, "optimizer", None)
        if inner is None or optimizer.ddp_config.use_megatron_fsdp:
            return original(*args, **kwargs)
        partners = _partners(inner.param_groups, state["optimizer"]["param_groups"], DISTRIBUTED)
        if partners is None:
            return original(*args, **kwargs)

        def with_partners(_: Any, loaded: Mapping[str, Any]) -> dict[str, Any]:
            groups = zip(loaded["param_groups"], partners, strict=True)
            return {**loaded, "param_groups": [{**partner, "params": group["params"]} for group, partner in groups]}

        hook = inner.register_load_state_dict_pre_hook(with_partners)
        try:
            return original(*args, **kwargs)
        finally:
            hook.remove()

    return load_state_dict


def _partners(current: Sequence[Group], saved: Sequence[Group], module: str) -> list[Group] | None:
    """For each group of the optimizer, that of the checkpoint. None where stock finds them, or raises its own error."""
    keys = sys.modules[module].param_group_identifier_keys
    theirs = [_values(group, keys) for group in saved]
    if len(set(theirs)) == len(theirs):
        return None
    mine = [_values(group, keys) for group in current]
    if not set(mine) <= set(theirs):
        return None

    partners: dict[int, int] = {}
    for kind in dict.fromkeys(mine):
        mates = [index for index, found in enumerate(theirs) if found == kind]
        if len(mates) == 1:  # as on stock, also for several groups
            partners.update({index: mates[0] for index, found in enumerate(mine) if found == kind})
            continue
        alone = []
        for index in (index for index, found in enumerate(mine) if found == kind):
            wanted = _values(current[index], FIELDS)
            same = next((mate for mate in mates if _values(saved[mate], FIELDS) == wanted), None)
            if same is None:
                alone.append(index)
            else:
                partners[index] = same
                mates.remove(same)
        if alone and not len(alone) == len(mates) == 1:
            raise ParamGroupsError(_ambiguous([current[index] for index in alone], [saved[mate] for mate in mates]))
        partners.update(zip(alone, mates, strict=False))
    return [saved[partners[index]] for index in range(len(current))]


def _values(group: Group, keys: Sequence[str]) -> tuple[Any, ...]:
    """What the group has for these keys, None where it has none. NeMo calls some of them pre_<key>."""
    return tuple(group[key] if key in group else group.get(f"pre_{key}") for key in keys)


def _ambiguous(current: Sequence[Group], saved: Sequence[Group]) -> str:
    def listed(groups: Sequence[Group]) -> str:
        return "; ".join(str({key: group[key] for key in FIELDS if key in group}) for group in groups) or "none"

    return (
        "[lr-param-groups] parameter groups of the checkpoint differ only in learning rates or weight decays, and "
        f"these have changed, so their partners are unknown. In the optimizer: {listed(current)}. In the checkpoint: "
        f"{listed(saved)}. Load the checkpoint with the values that it was written with, and change them afterwards."
    )


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {FILTER_AND_REORDER: _filter_and_reorder_param_groups, LOAD_STATE_DICT: _load_state_dict}
