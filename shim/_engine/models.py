"""Step 5, verify: whether bound patches take effect on a model."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

from shim._engine.aliases import namespace_of, unwrap
from shim._engine.binder import Binder
from shim._engine.overrides import calls
from shim._engine.report import Report
from shim._errors import ShimError
from shim._planning.plan import Plan
from shim._record import replace
from shim._releases.fingerprint import split_target

__all__ = ["Checked", "with_findings"]


class Checked:
    """The models of the last check(), as weak references, so that none is kept alive.

    Findings are not remembered. Each report examines the models anew, so it neither shows an override that is gone nor
    misses a target that another plan has bound.
    """

    def __init__(self) -> None:
        self._models: list[weakref.ref[Any]] = []

    def remember(self, models: list[Any]) -> None:
        # A class with slots may forbid weak references; a torch module never does.
        self._models = [weakref.ref(model) for model in models if hasattr(type(model), "__weakref__")]

    def forget(self) -> None:
        self._models = []

    def living(self) -> list[Any]:
        return [model for model in (reference() for reference in self._models) if model is not None]


def with_findings(report: Report, models: list[Any], plan: Plan, binder: Binder, *, raising: bool) -> Report:
    """The report, with the reasons why patches have no effect on these models. Called without the engine's lock.

    raising: whether an error in a patch's own check is raised. If not, the patch is inactive with that error as reason.
    """
    if not models:
        return report
    patches = dict(report.patches)
    for id, what, remedy in _problems_in(models, plan, raising):
        if patches[id].state == "applied":
            patches[id] = replace(patches[id], state="inactive", reason=what, remedy=remedy)
    for id, target, what in _shadows_in(models, plan, binder):
        if patches[id].state in ("applied", "pending"):
            patches[id] = replace(
                patches[id],
                state="shadowed",
                reason=f"{target}: {what}",
                targets={**patches[id].targets, target: "shadowed"},
                remedy="call the method of the base class in the override, or drop the override",
            )
    return replace(report, patches=patches)


def _problems_in(models: list[Any], plan: Plan, raising: bool) -> Iterator[tuple[str, str, str]]:
    """Triples (patch, why it has no effect on the models, remedy), from the `problems` functions of patches."""
    for decision in plan.decisions.values():
        module = sys.modules.get(plan.matrix.patches[decision.id].module) if decision.wanted else None
        find = namespace_of(module).get("problems") if module is not None else None
        try:
            for what, remedy in find(models) if find is not None else ():
                yield decision.id, what, remedy
        except ShimError as error:
            if raising:
                raise
            yield decision.id, str(error), ""


def _shadows_in(models: list[Any], plan: Plan, binder: Binder) -> Iterator[tuple[str, str, str]]:
    """Triples (patch, target, what shadows it) for every bound method that the models would not run."""
    instances = [module for item in models for module in item.modules()]
    for decision in plan.decisions.values():
        for target in decision.targets if decision.wanted else ():
            chain = binder.chains.get(target)
            if chain is None or not isinstance(chain.owner, type) or binder.loaded(split_target(target)[0]) is None:
                continue
            expected = unwrap(chain.top)
            said = set()
            for module in instances:
                if isinstance(module, chain.owner):
                    shadow = _shadow(module, chain.owner, chain.name, expected)
                    if shadow and shadow not in said:
                        said.add(shadow)
                        yield decision.id, target, shadow


def _shadow(module: Any, owner: type, name: str, expected: Any) -> str:
    """The object that hides the bound method of a class from an instance, in words; "" if there is none."""
    cls = type(module)
    own = getattr(module, "__dict__", {}).get(name)
    function = getattr(own, "__func__", own)
    if own is not None and function is not expected and not calls(function, name, expected, cls.__mro__):
        return f"an instance of {cls.__module__}.{cls.__qualname__} ({_file_of(cls)}) holds a {name} of its own"
    for place, holder in enumerate(cls.__mro__):
        if name not in namespace_of(holder):
            continue
        found = unwrap(namespace_of(holder)[name])
        if holder is owner or found is expected:
            break
        if not calls(found, name, expected, cls.__mro__[place + 1 :]):
            return f"{holder.__module__}.{holder.__qualname__} ({_file_of(holder)}) overrides {name}"
    return ""


def _file_of(cls: type) -> str:
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or cls.__module__
