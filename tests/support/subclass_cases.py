"""check() takes no function of shim's own for an override of a patched method, on a class whose base is patched too.

The tests are those of cells and of pairs.
"""

import pytest
import torch
from contract_cases import import_targets

import shim
from shim import testing
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


NESTED = nested(shim.plan())

pytestmark = pytest.mark.skipif(not NESTED, reason="no patch here binds a method in a class and in its subclass")


@pytest.fixture(autouse=True, scope="module")
def all_patches():
    with testing.megatron_on_cpu(), shim.patched():
        yield


def test_functions_of_shims_in_subclasses_override_nothing():
    report = shim.check(torch.nn.ModuleList([bare(heir) for heir in {heir: None for _, _, heir in NESTED}]))
    amiss = {id: report[id].reason for id, _, _ in NESTED if report[id].state != "applied"}
    assert not amiss, amiss
    told = [(id, heir, said) for id, _, heir in NESTED for said in report[id].others if heir.__qualname__ in said]
    assert not told, told


@pytest.mark.parametrize(("id", "target", "heir"), NESTED)
def test_a_function_of_a_user_above_it_is_still_seen(id, target, heir):
    cls = of_a_user(heir, target)
    found = shim.check(torch.nn.ModuleList([bare(cls)]))[id]
    assert found.state in ("unknown", "shadowed")
    assert cls.__qualname__ in found.reason and "overrides" in found.reason
