"""The requirements on a plan: require, strict, on_drift, lock; and what a later apply() takes from an earlier."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shim._errors import NotMetError
from shim._matrix.model import RIGHT
from shim._planning.plan import Decision, Plan

__all__ = ["changed_by", "enforce"]


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
        from shim._planning.lock import enforce_lock  # here, because most plans have none

        enforce_lock(plan)


# A second apply(). One process has one set of patches, so the last call counts. Two callers, such as a library and the
# script that imports it, need not know of each other. So the later call says what it takes from the earlier one.

_MOST = 12  # ids in one line
_WANTED = ("apply", "conflict")  # a conflict of the plan in force is a patch that was asked for


def changed_by(after: Plan, before: Plan) -> str:
    """One line about what `after` takes from `before`, the plan in force until now; "" if it takes nothing.

    The same arguments take nothing, and neither does a further demand (`require`, `strict`, a lock).
    """
    if after.options == before.options and after.matrix.path == before.matrix.path:
        return ""  # what differs is what is installed, which no caller has asked for
    changes = list(_changes(before, after))
    if not changes:
        return ""
    return (
        f"{after.asked_by} changes the request of {before.asked_by}: {'; '.join(changes)}. The last call counts "
        f"for the whole process. Remedy: give all arguments in one call, or in both{_without(before, after)}."
    )


def _without(before: Plan, after: Plan) -> str:
    back = [id for id in _come(before, after) if id in before.options.exclude]
    return f"; MEGATRON_SHIM_EXCLUDE={','.join(back[:_MOST])} leaves out for every call" if back else ""


def _come(before: Plan, after: Plan) -> list[str]:
    """The patches that `after` applies and `before` did not."""
    there = {id for id, decision in before.decisions.items() if decision.action in _WANTED}
    return [id for id, decision in after.decisions.items() if decision.action in _WANTED and id not in there]


def _changes(before: Plan, after: Plan) -> Iterator[str]:
    if after.matrix.path != before.matrix.path:
        yield f"patches are those of {after.matrix.path}, and not those of {before.matrix.path}"
    if come := _come(before, after):
        yield f"applied now, and not before: {_listed(come)}"
    if gone := _come(after, before):
        yield f"no longer applied: {_listed(gone)}"
    for id, decision in after.decisions.items():
        old = before.decisions.get(id)
        if old is None or decision.action not in _WANTED or old.action not in _WANTED:
            continue
        for name, value in (decision.options or {}).items():
            if name in (old.options or {}) and old.options[name] != value:
                yield f"{name} of {id} is {value!r}, and was {old.options[name]!r}"
    yield from _demands(before, after)


def _demands(before: Plan, after: Plan) -> Iterator[str]:
    """The demands on the plan that only the earlier call made."""
    was, now = before.options, after.options
    if dropped := sorted(was.require - now.require):
        yield f"no longer required: {_listed(dropped)}"
    if was.strict and not now.strict:
        yield "no longer strict"
    if was.rounding and not now.rounding:
        yield "rounding is not asked for any more"
    if was.concerns != now.concerns and now.concerns is not None:
        before_them = "all runs" if was.concerns is None else ", ".join(was.concerns)
        yield f"concerns names {', '.join(now.concerns)}, and named {before_them}"
    if was.on_drift not in ("skip", now.on_drift):
        yield f"on_drift is {now.on_drift!r}, and was {was.on_drift!r}"
    if was.lock not in (None, now.lock):
        yield f"the lock {was.lock} no longer counts" + (f", but {now.lock}" if now.lock else "")


def _listed(ids: Iterable[str]) -> str:
    names = list(ids)
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more
