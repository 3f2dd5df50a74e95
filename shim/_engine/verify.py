"""Step 5, verify: states of patches, read back from the process. models.py adds the states on a model."""

from __future__ import annotations

from collections.abc import Mapping

from shim._engine.binder import Binder
from shim._engine.report import PatchReport, Report
from shim._planning.plan import Decision, Plan
from shim._record import replace
from shim._releases.fingerprint import split_target

__all__ = ["not_applied", "read_report"]


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
    """The report of this moment. A patch is "applied" only if it was read back. `held`: see PatchReport.holds."""
    releases = {name: i.raw or "unknown" for name, i in plan.environment.installed.items()}
    patches = {
        id: replace(_state(decision, plan.matrix.patches[id].summary, binder, failed), holds=held.get(id, ()))
        for id, decision in plan.decisions.items()
    }
    return Report(patches, plan.digest, releases, tuple(map(str, binder.places.lost_now())))


def not_applied(plan: Plan) -> Plan:
    """The plan to report on if nothing is applied."""
    reason = "shim.apply() has not been called in this process, or was reverted"
    excluded = {
        id: replace(decision, action="excluded", reason=reason)
        for id, decision in plan.decisions.items()
        if decision.wanted
    }
    return replace(plan, decisions={**plan.decisions, **excluded})
