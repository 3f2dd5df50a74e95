"""Patches that bind a method of a class, where shim also binds the method of that name in one of its subclasses."""

import torch
from contract_cases import import_targets

from shim._engine.engine import ENGINE


def nested(plan):
    """Patch, target, and the class whose own method of that name is a target too, of this patch or another."""
    import_targets(plan)
    methods = [
        (id, target, *ENGINE.binder.resolve(target, may_be_missing=True)[:2])
        for id, decision in plan.decisions.items()
        for target in (decision.targets if decision.wanted else ())
        if "." in target.partition(":")[2] and ENGINE.binder.loaded(target.partition(":")[0]) is not None
    ]
    return [
        (id, target, heir)
        for id, target, owner, name in methods
        for _, _, heir, of_heir in methods
        if of_heir == name and heir is not owner and isinstance(heir, type) and issubclass(heir, owner)
    ]


def of_a_user(cls, target):
    """A class of a user, whose method in the place of a target calls nothing of what it overrides."""
    name = target.rpartition(".")[2]
    return type("OfAUser", (cls,), {name: lambda self, *args, **kwargs: None})


def bare(cls):
    """An instance of a module class that holds nothing: check() reads its class."""
    made = cls.__new__(cls)
    torch.nn.Module.__init__(made)
    return made
