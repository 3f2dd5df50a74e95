"""Where the processes of proofs look for aliases: the shorter search finds all that the long one finds."""

import functools
import inspect
import sys
import types

import pytest
import torch

import shim
from shim._engine import names, transactions
from shim._proving.aliases import narrow
from shim._releases.fingerprint import split_target

CELLS = {"0.19.2": "all"}
ABOUT = []


@pytest.fixture
def narrowed(monkeypatch):
    """Narrows the search, and returns it."""

    def make():
        monkeypatch.setattr(transactions, "find_aliases", names.find_aliases)
        narrow()
        return transactions.find_aliases

    return make


def object_of(target):
    module, qualname = split_target(target)
    *path, name = qualname.split(".")
    owner = functools.reduce(getattr, path, sys.modules[module])
    return names.unwrap(inspect.getattr_static(owner, name, None))


def places(search, *objects):
    return {(id(owner), name) for owner, name, _ in search(objects)}


def modules_of(search, monkeypatch):
    """How many modules a search looks at."""
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(names, "namespace_of", lambda owner: seen.append(owner) or {})
        search([shim.apply])
    return sum(isinstance(owner, types.ModuleType) for owner in seen)


def test_all_aliases_of_all_targets_are_found_in_a_third_of_the_modules(narrowed, monkeypatch):
    shorter = narrowed()
    targets = {target for decision in shim.plan().decisions.values() if decision.wanted for target in decision.targets}
    found = [object_of(target) for target in targets if split_target(target)[0] in sys.modules]
    own = [each for each in found if callable(each) and each.__module__.startswith("megatron.")]
    assert len(own) > 50
    assert places(shorter, *own) == places(names.find_aliases, *own)
    monkeypatch.setattr(shim.apply, "__module__", "megatron")
    assert 0 < modules_of(shorter, monkeypatch) < modules_of(names.find_aliases, monkeypatch) / 3


def test_a_module_of_others_is_searched_if_it_holds_one_or_comes_later(narrowed, monkeypatch):
    from megatron.core.models.gpt.gpt_model import GPTModel

    early, late = types.ModuleType("early"), types.ModuleType("late")
    monkeypatch.setattr(torch.nn.functional, "a_function", GPTModel.forward, raising=False)
    monkeypatch.setattr(torch.nn.Linear, "a_method", GPTModel.forward, raising=False)
    monkeypatch.setitem(sys.modules, "early", early)
    shorter = narrowed()
    late.function = early.function = GPTModel.forward
    monkeypatch.setitem(sys.modules, "late", late)
    found = places(shorter, GPTModel.forward)
    assert {(id(late), "function"), (id(torch.nn.Linear), "a_method")} <= found
    assert (id(torch.nn.functional), "a_function") in found
    assert (id(early), "function") not in found  # of which it was known that it holds nothing


def test_an_object_of_others_is_searched_everywhere(narrowed):
    shorter = narrowed()
    assert places(shorter, torch.nn.Linear) == places(names.find_aliases, torch.nn.Linear)
