"""A wrapper of somebody's on a target, as many trainers write it: it takes any arguments, and copies no names."""

import importlib
import types
from functools import cache

import shim


@cache
def patches_by_target():
    found = {}
    for id, decision in shim.plan().decisions.items():
        for target in decision.targets if decision.wanted else ():
            found.setdefault(target, []).append(id)
    return found


def functions(package):
    """(target, class or module, name) of each target in megatron or transformer_engine that is a plain function."""
    for target in sorted(target for target in patches_by_target() if target.startswith(f"{package}.")):
        module, _, qualname = target.partition(":")
        *path, name = qualname.split(".")
        try:
            owner = importlib.import_module(module)
        except ImportError:  # of what needs another package
            continue
        for part in path:
            owner = vars(owner).get(part, object)
        if isinstance(vars(owner).get(name), types.FunctionType):
            yield target, owner, name


def around(function):
    def somebodys(*args, **kwargs):
        return function(*args, **kwargs)

    return somebodys


class Called:
    """A wrapper that is no function, and shows no signature."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self, instance)


def states_beside_a_wrapper(target, owner, name, kind, monkeypatch):
    """The states of the patches of `target` when a wrapper of a kind stands there before apply(). It stays there."""
    wrapper = kind(vars(owner)[name])
    monkeypatch.setattr(owner, name, wrapper)
    patches = patches_by_target()[target]
    with shim.patched(only=patches) as report:
        states = {id: report[id].state for id in patches}
    assert vars(owner)[name] is wrapper
    return states
