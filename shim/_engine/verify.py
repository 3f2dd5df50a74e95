"""Step 5, verify: states read back from the process as it is, down to the modules of a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shim._engine.aliases import namespace_of, unwrap
from shim._engine.binder import Binder
from shim._engine.report import PatchReport, Report
from shim._planning.plan import Decision, Plan
from shim._releases.fingerprint import split_target

__all__ = ["not_applied", "problems_in", "read_report", "shadows_in"]


def _state(decision: Decision, summary: str, binder: Binder, failed: Mapping[str, str]) -> PatchReport:
    def report(state: str, reason: str, targets: Mapping[str, str] | None = None, remedy: str = "") -> PatchReport:
        return PatchReport(decision.id, decision.kind, state, reason, decision.variant, targets or {}, remedy, summary)

    if not decision.wanted:
        targets = dict.fromkeys(decision.targets, decision.action)
        return report(decision.action, decision.reason, targets, decision.remedy)
    if decision.id in failed:
        remedy = f"report it with the output of `shim doctor`, and exclude {decision.id} meanwhile"
        return report("failed", failed[decision.id], dict.fromkeys(decision.targets, "failed"), remedy)
    lost = binder.lost_targets()
    targets = {}
    for target in decision.targets:
        if target in lost:
            targets[target] = "lost"
        elif binder.bound(decision.id, target):
            targets[target] = "bound"
        else:
            targets[target] = "pending"
    if "lost" in targets.values():
        first = next(target for target in targets if targets[target] == "lost")
        remedy = "apply shim after the other patch, or leave one of the two out"
        return report("conflict", f"{first}: {lost[first]}", targets, remedy)
    waiting = [t for t, state in targets.items() if state == "pending" and t not in decision.optional]
    if waiting:
        modules = ", ".join(dict.fromkeys(split_target(target)[0] for target in waiting))
        return report("pending", f"waits for the import of {modules}; {decision.reason}", targets)
    return report("applied", decision.reason, targets)


def read_report(plan: Plan, binder: Binder, failed: Mapping[str, str], held: Mapping[str, tuple[str, ...]]) -> Report:
    """The report of this moment: "applied" is only said of what was read back. `held`: see PatchReport.holds."""
    releases = {name: i.raw or "unknown" for name, i in plan.environment.installed.items()}
    patches = {
        id: replace(_state(decision, plan.matrix.patches[id].summary, binder, failed), holds=held.get(id, ()))
        for id, decision in plan.decisions.items()
    }
    return Report(patches, plan.digest, releases, tuple(map(str, binder.places.lost_now())))


def not_applied(plan: Plan) -> Plan:
    """The plan of a process in which nothing is applied."""
    reason = "shim.apply() has not been called in this process, or was reverted"
    excluded = {
        id: replace(decision, action="excluded", reason=reason)
        for id, decision in plan.decisions.items()
        if decision.wanted
    }
    return replace(plan, decisions={**plan.decisions, **excluded})


def _definition_of(cls: type, name: str) -> type | None:
    return next((c for c in cls.__mro__ if name in namespace_of(c)), None)


def _file_of(cls: type) -> str:
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or cls.__module__


def _shadow(module: Any, owner: type, name: str, expected: Any) -> str:
    """What stands between an instance and the patched attribute of its class; "" where nothing does."""
    cls = type(module)
    own = getattr(module, "__dict__", {}).get(name)
    if own is not None and getattr(own, "__func__", own) is not expected:
        return f"an instance of {cls.__module__}.{cls.__qualname__} ({_file_of(cls)}) holds a {name} of its own"
    holder = _definition_of(cls, name)
    if holder is not None and holder is not owner and unwrap(namespace_of(holder)[name]) is not expected:
        return f"{holder.__module__}.{holder.__qualname__} ({_file_of(holder)}) overrides {name}"
    return ""


def problems_in(model: Any, plan: Plan) -> Iterator[tuple[str, str, str]]:
    """(patch, what keeps it from having its effect on `model`, remedy), as the patch modules themselves see it."""
    models = [model] if hasattr(model, "modules") else list(model)
    for decision in plan.decisions.values():
        module = sys.modules.get(plan.matrix.patches[decision.id].module) if decision.wanted else None
        find = namespace_of(module).get("problems") if module is not None else None
        for what, remedy in find(models) if find is not None else ():
            yield decision.id, what, remedy


def shadows_in(model: Any, plan: Plan, binder: Binder) -> Iterator[tuple[str, str, str]]:
    """(patch, target, what shadows it) for every wanted method that the modules of `model` would not run.

    `model` is a torch module or an iterable of them (virtual pipeline chunks).
    """
    models = [model] if hasattr(model, "modules") else list(model)
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
