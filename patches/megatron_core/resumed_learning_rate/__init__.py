"""The learning rates and weight decays with which a run goes on.

What is wrong (0.12 to 0.20): a run says by override_opt_param_scheduler that its own learning rates hold, and by
use_checkpoint_opt_param_scheduler that those of the checkpoint do. The scheduler obeys for its own values, but a
parameter group has some, too (max_lr, min_lr, from 0.16 on start_wd and end_wd), which come before the scheduler's.
1. Loading the optimizer takes them from the checkpoint. So with override_opt_param_scheduler, which is verl's default,
   a new learning rate is dropped in silence (0.12 to 0.18).
2. From 0.19 on they are part of the key by which a group finds its own, so a new learning rate raises "Could not find
   parameter group" or a KeyError, whatever the run asked for.
3. With use_checkpoint_opt_param_scheduler the first step has the weight decay of the run, because the scheduler
   computes it before it reads the checkpoint's.
4. With neither of the two, a checkpoint whose learning rate is another is refused. The rate of a group, as that of
   decoupled_lr, is not compared, and is the checkpoint's (0.12 to 0.18).

The patch lets a scheduler tell its optimizers what it was asked for. With override_opt_param_scheduler groups keep the
values that they have when the optimizer is loaded, and their lr and weight_decay. With the other they get those of the
checkpoint, and the scheduler computes them once more at its end. With neither of the two it raises a ResumeError if a
group differs. A group finds its own without its rates if it is the only one left over in both. If several are
left over, the one of the default config goes with the one of the default config. Others may go any way under
override_opt_param_scheduler, unless those of the checkpoint differ in something that is loaded; else a ResumeError
names them. The file stays as it is.

Not covered: a scheduler that was made before shim.apply(), or after the optimizer was loaded. What a scheduler does not
save stays the run's own in any case: init_lr, wsd_decay_steps, lr_wsd_decay_style.

Upstream: pull request 5213 is on the dev branch. On main megatron.training gives every group the rates of its
arguments, also one with a rate of its own (issue 7173).

Delete when: megatron-core itself keeps the rates of groups that override_opt_param_scheduler asks for, and the releases
before that are not supported.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shim._errors import ShimError
from shim.patches._arguments import Function, argument

SCHEDULER = "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler."
OPTIMIZER = "megatron.core.optimizer.optimizer"
DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"

ASKED = "_shim_scheduler"  # of an optimizer: a reference to its scheduler
RATES = ("max_lr", "min_lr", "start_wd", "end_wd")  # of a group, which come before the scheduler's
DEFAULT = "default_config"  # of a group: whether nothing overrides its settings
OWN = (*RATES, "lr", "weight_decay", DEFAULT)  # what a run keeps that overrides the checkpoint
KINDS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "optimizer")  # what no resume changes

Group = dict[str, Any]


class ResumeError(ShimError, ValueError):
    """The learning rates with which this run shall go on cannot be told."""


def _init(original: Function) -> Function:
    optimizer_of = argument(original, "optimizer")

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for optimizer in _each(optimizer_of((self, *args), kwargs)):
            setattr(optimizer, ASKED, weakref.ref(self))
        original(self, *args, **kwargs)

    return __init__


def _each(optimizer: Any) -> Iterator[Any]:
    """The optimizers of a chain, or the one."""
    for part in getattr(optimizer, "chained_optimizers", ()):
        yield from _each(part)
    yield optimizer


def _load_scheduler(original: Function) -> Function:
    @functools.wraps(original)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        self.step(0)  # once more, by the weight decays that it has now
        return found

    return load_state_dict


def _load_optimizer(original: Function) -> Function:
    state_of = argument(original, "state_dict")

    @functools.wraps(original)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler = getattr(self, ASKED, lambda: None)()
        if scheduler is None or getattr(self, "optimizer", None) is None:
            return original(self, *args, **kwargs)
        groups = self.optimizer.param_groups
        own = [_part(group, OWN) for group in groups]
        saved = _saved_groups(state_of((self, *args), kwargs))
        keeps_own = scheduler.override_opt_param_scheduler
        try:
            _meet(groups, saved, keeps_own, scheduler.use_checkpoint_opt_param_scheduler)
            found = original(self, *args, **kwargs)
        except BaseException:
            keeps_own = True
            raise
        finally:
            if keeps_own:
                for group, values in zip(self.optimizer.param_groups, own, strict=True):
                    for name in RATES:
                        group.pop(name, None)
                    group.update(values)
        return found

    return load_state_dict


def _part(group: Mapping[str, Any], names: Sequence[str]) -> Group:
    return {name: group[name] for name in names if name in group}


def _saved_groups(state: Mapping[str, Any]) -> Sequence[Group]:
    """The groups of a checkpoint; none if they are not in the form of this optimizer, as with Megatron-FSDP."""
    for name in ("optimizer", "optimizer_state_dict"):
        state = state.get(name) or state
    return state.get("param_groups") or ()


def _meet(groups: Sequence[Group], saved: Sequence[Group], keeps_own: bool, takes_saved: bool) -> None:
    """Give groups the rates of their partners in the checkpoint, by which it is found in every release."""
    partners = _partners(groups, saved, keeps_own)
    if not (keeps_own or takes_saved):
        changed = [index for index, mate in partners.items() if _part(groups[index], RATES) != _part(mate, RATES)]
        if changed:
            raise _error("have changed", [groups[index] for index in changed], [partners[index] for index in changed])
    for index, mate in partners.items():
        for name in RATES:
            groups[index].pop(name, None)
        groups[index].update(_part(mate, RATES))


def _partners(groups: Sequence[Group], saved: Sequence[Group], keeps_own: bool) -> dict[int, Group]:
    """Of each group, by its number, that of the checkpoint. Nothing if stock is to say what is wrong with them."""
    if not hasattr(sys.modules[OPTIMIZER], "param_group_identifier_keys"):
        return dict(enumerate(saved)) if len(groups) == len(saved) else {}  # before 0.13 groups go by their place
    mine, theirs = ([_kind(group) for group in each] for each in (groups, saved))
    partners: dict[int, Group] = {}
    for kind in dict.fromkeys(mine):
        mates = [saved[index] for index, found in enumerate(theirs) if found == kind]
        numbers = [index for index, found in enumerate(mine) if found == kind]
        if not mates:
            return {}
        if len(mates) == 1:
            partners.update(dict.fromkeys(numbers, mates[0]))
            continue
        for index in list(numbers):
            same = next((mate for mate in mates if _part(mate, RATES) == _part(groups[index], RATES)), None)
            if same is not None:
                partners[index] = same
                mates = [mate for mate in mates if mate is not same]
                numbers.remove(index)
        for flag in (True, False):
            ours = [index for index in numbers if groups[index].get(DEFAULT) is flag]
            others = [mate for mate in mates if mate.get(DEFAULT) is flag]
            if len(ours) == len(others) == 1:
                partners[ours[0]] = others[0]
                numbers.remove(ours[0])
                mates = [mate for mate in mates if mate is not others[0]]
        alike = keeps_own and bool(mates) and all(_rest(mate) == _rest(mates[0]) for mate in mates)
        if numbers and not (alike or len(numbers) == len(mates) == 1):
            raise _error("have changed, so their partners are unknown", [groups[index] for index in numbers], mates)
        for place, index in enumerate(numbers):
            partners[index] = mates[min(place, len(mates) - 1)]
    return partners


def _kind(group: Group) -> tuple[Any, ...]:
    """What groups go by beside their rates. NeMo calls some of it pre_<key>."""
    return tuple(group[key] if key in group else group.get(f"pre_{key}") for key in KINDS)


def _rest(group: Group) -> Group:
    """What else is loaded of a group."""
    return {name: value for name, value in group.items() if name not in (*OWN, "params")}


def _error(what: str, groups: Sequence[Group], saved: Sequence[Group]) -> ResumeError:
    def listed(each: Sequence[Group]) -> str:
        return "; ".join(str(_part(group, RATES)) for group in each) or "none"

    return ResumeError(
        f"[resumed-learning-rate] learning rates or weight decays of parameter groups {what}. In the optimizer: "
        f"{listed(groups)}. In the checkpoint: {listed(saved)}. Set override_opt_param_scheduler to train with the "
        "first, or resume with the settings of the run that wrote the checkpoint."
    )


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {
        SCHEDULER + "__init__": _init,
        SCHEDULER + "load_state_dict": _load_scheduler,
        f"{OPTIMIZER}:Float16OptimizerWithFloat16Params.load_state_dict": _load_optimizer,
        f"{OPTIMIZER}:FP32Optimizer.load_state_dict": _load_optimizer,
        f"{DISTRIBUTED}:DistributedOptimizer.load_state_dict": _load_optimizer,
    }
