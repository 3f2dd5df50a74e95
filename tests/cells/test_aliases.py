"""Where shim looks for aliases: not in Python, torch and what torch requires, which hold nothing of megatron-core's."""

import functools
import inspect
import sys
import types

import torch

import shim
from shim._engine.names import find_aliases, imports_no_megatron, unwrap
from shim._releases.fingerprint import split_target

CELLS = {"0.14.0": "all", "0.19.2": "all"}
ABOUT = []


def object_of(target):
    module, qualname = split_target(target)
    *path, name = qualname.split(".")
    owner = functools.reduce(getattr, path, sys.modules[module])
    return unwrap(inspect.getattr_static(owner, name, None))


def places(*searched):
    return {(id(owner), name) for owner, name, _ in find_aliases(*searched)}


def test_a_search_of_all_modules_finds_no_other_aliases_of_targets():
    """Nor does a target hold an object of such a package that shim would have to replace there."""
    wanted = [decision for decision in shim.plan().decisions.values() if decision.wanted]
    targets = {target for each in wanted for target in each.targets if target not in each.wiring.no_aliases}
    found = [object_of(target) for target in targets if split_target(target)[0] in sys.modules]
    found = [each for each in found if callable(each)]
    assert len(found) > 50 and not any(imports_no_megatron(str(each.__module__)) for each in found)
    assert places(found) == places(found, list(sys.modules))


def test_a_module_of_others_is_searched_and_torch_is_not(monkeypatch):
    from megatron.core.models.gpt.gpt_model import GPTModel

    others = types.ModuleType("others")
    others.function = GPTModel.forward
    others.Class = type("Class", (torch.nn.Linear,), {"method": GPTModel.forward, "__module__": "others"})
    monkeypatch.setitem(sys.modules, "others", others)
    monkeypatch.setattr(torch.nn.functional, "a_function", GPTModel.forward, raising=False)
    found = places([GPTModel.forward])
    assert {(id(others), "function"), (id(others.Class), "method")} <= found
    assert (id(torch.nn.functional), "a_function") not in found
