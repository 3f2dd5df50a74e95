"""Functions that a model took while shim had not bound them, such as config.finalize_model_grads_func."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from shim._engine.aliases import unwrap
from shim._engine.records import Records
from shim._planning.plan import Plan

__all__ = ["StaleReference", "stale_references"]


class StaleReference(NamedTuple):
    """A place in a model that holds upstream's own function of a target."""

    patch: str
    target: str
    place: str


def stale_references(modules: Iterable[Any], plan: Plan, binder: Records) -> Iterator[StaleReference]:
    """The attributes of modules and of their configs that hold the function of a target as it was before it was bound.

    Methods are left out: a model runs a method of its class by its name, and if it holds one under another name,
    mostly to put it back, it may never run that one. Closures and containers are out of reach.
    """
    wanted: dict[int, list[tuple[str, str]]] = {}
    for decision in plan.decisions.values():
        for target in decision.targets if decision.wanted else ():
            chain = binder.chains.get(target)
            if chain is not None and type(chain.owner) is types.ModuleType:
                base = unwrap(chain.base)
                if type(base) is types.FunctionType and base is not unwrap(chain.top):
                    wanted.setdefault(id(base), []).append((decision.id, target))
    if not wanted:
        return
    seen: set[int] = set()
    for module in modules:
        owner = f"{type(module).__module__}.{type(module).__qualname__}"
        for holder, prefix in ((module, ""), (getattr(module, "config", None), "config.")):
            if id(holder) in seen:
                continue
            seen.add(id(holder))
            for name, value in _namespace_of(holder).items():
                function = value.func if type(value) is functools.partial else value
                for patch, target in wanted.get(id(function), ()):
                    yield StaleReference(patch, target, f"{prefix}{name} of {owner}")


def _namespace_of(holder: Any) -> Mapping[str, Any]:
    found = getattr(holder, "__dict__", {})
    return dict(found) if type(found) is dict else {}
