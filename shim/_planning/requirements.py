"""The requirements on a plan: require, strict, on_drift, the lock."""

from __future__ import annotations

from shim._errors import NotMetError
from shim._matrix.model import RIGHT
from shim._planning.lock import enforce_lock
from shim._planning.plan import Decision, Plan

__all__ = ["enforce"]


def _unmet(plan: Plan, decision: Decision) -> str:
    """Reason, targets, releases and remedy of a decision that does not meet a requirement."""
    entry = plan.matrix.patches[decision.id]
    releases = plan.matrix.supported.get(entry.distribution, ("any",))
    remedies = {
        "not-installed": f"install {entry.distribution} ({releases[0]} to {releases[-1]}), or do not require the patch",
        "out-of-range": f"install {entry.distribution} {releases[0]} to {releases[-1]}, or do not require the patch",
        "excluded": "drop what excludes it (an argument, or a MEGATRON_SHIM_ variable), or do not require the patch",
    }
    remedy = decision.remedy or remedies.get(decision.action, "see shim doctor")
    installed = ", ".join(f"{i.distribution} {i.raw}" for i in plan.environment.installed.values()) or "nothing"
    targets = decision.targets or entry.targets
    if decision.action == "not-installed":  # the targets of all variants, which are too many to be read
        targets = tuple(dict.fromkeys(target.partition(":")[0] for target in targets))
    return f"{decision.reason}. Its targets: {', '.join(targets)}. Installed: {installed}. Remedy: {remedy}."


def _refuse_part(plan: Plan, decision: Decision) -> None:
    """Raise NotMetError if a patch that is applied in part has to be applied whole."""
    options = plan.options
    demands = {
        "required": decision.id in options.require,
        "on_drift='error'": options.on_drift == "error",
        "strict": options.strict and decision.kind == "correctness",
    }
    demand = next((name for name, holds in demands.items() if holds), None)
    if demand is not None:
        what = "; ".join(f"{target}: {why}" for target, why in decision.dropped.items())
        raise NotMetError(
            f"{demand}, but {decision.id} can be applied only in part, without {what}. Nothing was applied. "
            f"Remedy: {decision.remedy}."
        )


def enforce(plan: Plan) -> None:
    """Raise NotMetError if the plan does not meet `require`, `strict`, ``on_drift="error"`` or the lock."""
    for decision in plan.decisions.values():
        met = (decision.wanted and not decision.dropped) or decision.action in RIGHT
        if met or plan.options.disabled:
            continue
        if decision.dropped:
            if plan.options.trial is None:  # a trial asks for the parts that are there
                _refuse_part(plan, decision)
            continue
        what = f"{decision.id} is {decision.action}: {_unmet(plan, decision)} Nothing was applied."
        if decision.id in plan.options.require:
            raise NotMetError(f"required, but {what}")
        if decision.action == "drifted" and plan.options.on_drift == "error":
            raise NotMetError(f"on_drift='error', and {what}")
        is_problem = decision.action in ("drifted", "conflict")
        if is_problem and plan.options.strict and decision.kind == "correctness":
            raise NotMetError(f"strict, and {what}")
    if plan.options.lock is not None:
        enforce_lock(plan)
