"""Step 5, verify: states of patches, read back from the process. models.py adds the states on a model."""

from __future__ import annotations

from collections.abc import Mapping

from shim._compatible import marks_of
from shim._engine.aliases import unwrap
from shim._engine.chain import Replaced, replaced_by
from shim._engine.conflicts import remedy_for, remedy_in_doubt, remedy_untried
from shim._engine.foreign import describe
from shim._engine.records import Records
from shim._engine.report import NOT_IMPORTED, NOT_KNOWN, PatchReport, Report, switched_off
from shim._planning.plan import Decision, Plan
from shim._record import replace
from shim._releases.fingerprint import split_target

__all__ = ["not_applied", "read_report", "reason_of"]


def _state(
    decision: Decision, plan: Plan, binder: Records, failed: Mapping[str, str], lost: Mapping[str, Replaced]
) -> PatchReport:
    entry = plan.matrix.patches[decision.id]
    summary = entry.summary

    def report(state: str, reason: str, targets: Mapping[str, str] | None = None, remedy: str = "") -> PatchReport:
        return PatchReport(decision.id, decision.kind, state, reason, decision.variant, targets or {}, remedy, summary)

    def off(options: Mapping[str, object], why: str, targets: Mapping[str, str]) -> PatchReport | None:
        """A patch that is switched off loses nothing by somebody else's object in its place."""
        names = entry.off_by(options)
        if not names:
            return None
        what, remedy = switched_off(entry.id, names)
        return report("inactive", f"{what}; {why}", targets, remedy)

    if not decision.wanted:
        targets = dict.fromkeys(decision.targets, decision.action)
        unused = off(decision.without_conflict.options, decision.reason, targets) if decision.without_conflict else None
        return unused or report(decision.action, decision.reason, targets, decision.remedy)
    if decision.id in failed:
        remedy = f"report it with the output of `shim doctor`, and exclude {decision.id} meanwhile"
        return report("failed", failed[decision.id], dict.fromkeys(decision.targets, "failed"), remedy)
    targets = {target: _on(target, decision, binder, lost) for target in decision.targets}
    spared = {} if decision.wiring is None else decision.wiring.spared
    others = tuple(_others(decision, targets, binder, lost))
    replaced = [target for target, state in targets.items() if state == "lost" and target not in spared]
    if replaced:  # and nobody has looked since: conflicts are found before a report is made
        who, slot = _who(lost[replaced[0]]), lost[replaced[0]].slot
        reason = f"{replaced[0]}: {slot} {replaced_by(slot.current())}, which does not call shim's function"
        return off(decision.options, reason, targets) or report(
            "conflict", reason, targets, remedy_for(decision.id, who)
        )
    waiting = [t for t, state in targets.items() if state == "pending" and t not in decision.optional]
    if waiting:
        modules = ", ".join(dict.fromkeys(split_target(target)[0] for target in waiting))
        made = report("pending", f"waits for the import of {modules}; {decision.reason}", targets)
    elif targets and set(targets.values()) == {"pending"}:
        # A target that is optional keeps nobody waiting, but `applied` is said of nothing that is not bound.
        modules = ", ".join(dict.fromkeys(split_target(target)[0] for target in targets))
        made = report("pending", f"{NOT_IMPORTED}: {modules}, and patched as soon as it is; {decision.reason}", targets)
    elif unknown := [target for target, state in targets.items() if state == "unknown"]:
        who = _who(lost[unknown[0]])
        reason = f"{NOT_KNOWN}: whether {who} calls shim's function on {unknown[0]}, which it holds"
        made = report("pending", reason, targets, remedy_in_doubt(decision.id, who))
    elif untried := [question for key, question in binder.found.open.items() if key[0] == decision.id]:
        reason = f"{NOT_KNOWN}: whether {untried[0].who}, which replaces {untried[0].method}, does what the patch does"
        made = report("pending", reason, targets, remedy_untried(untried[0].who))
        made = off(decision.options, decision.reason, targets) or made
    elif decision.id in binder.found.doubts:
        reason = f"{NOT_KNOWN}: {binder.found.doubts[decision.id][1]}"
        made = report("pending", reason, targets, f"exclude {decision.id}, or test what becomes of it")
    else:
        made = report("applied", reason_of(decision, binder), targets)
    return replace(made, others=others)


def reason_of(decision: Decision, binder: Records) -> str:
    """Why a patch is applied: what is known of the bodies in the files, and which functions run in their place."""
    around = [(target, binder.found.around.get((decision.id, target))) for target in decision.targets]
    told = [f"{target} is {found.who}, which {found.why}" for target, found in around if found is not None]
    return "; but ".join([decision.reason, *told])


def _who(lost: Replaced) -> str:
    return describe(unwrap(lost.slot.current()))


def _on(target: str, decision: Decision, binder: Records, lost: Mapping[str, Replaced]) -> str:
    """How a target stands: bound, called by somebody's object, lost or left to it, kept by it, unknown or pending."""
    if (decision.id, target) in binder.found.open:
        return "untried"
    if target in decision.left:
        return "left" if decision.left[target] else "kept"
    if target in lost:
        effect = binder.effect_of(lost[target])
        return "lost" if effect == "replaced" else effect
    return "bound" if binder.bound(decision.id, target) else "pending"


def _others(decision: Decision, targets: Mapping[str, str], binder: Records, lost: Mapping[str, Replaced]) -> list[str]:
    """What other people's objects on the targets do, one sentence each."""
    found = []
    for target, state in targets.items():
        around = binder.found.around.get((decision.id, target))
        if state == "untried":
            question = binder.found.open[decision.id, target]
            found.append(f"{question.method} is replaced by {question.who}")
        elif around is not None:
            found.append(f"{target} is replaced by {around.who}; the patch goes around it")
        elif state == "called":
            found.append(f"{target} is wrapped by {_who(lost[target])}, which calls shim's")
        elif state == "kept":
            theirs = lost[target].slot.current() if target in lost else binder.resolve(target)[2]
            marked = marks_of(theirs).get(target, "")
            found.append(f"{describe(unwrap(theirs))} says that it keeps {target}, as of shim {marked}")
        elif state in ("left", "lost") and decision.wiring is not None and target in decision.wiring.spared:
            who = decision.left.get(target) or _who(lost[target])
            found.append(f"{target} is replaced by {who}: {decision.wiring.spared[target]}")
    read = [question for (id, body), question in binder.found.open.items() if id == decision.id and body not in targets]
    return [*found, *(f"{question.method} is replaced by {question.who}" for question in read)]


def read_report(plan: Plan, binder: Records, failed: Mapping[str, str], held: Mapping[str, tuple[str, ...]]) -> Report:
    """The report of this moment. A patch is "applied" only if it was read back. `held`: see PatchReport.holds."""
    releases = {name: i.raw or "unknown" for name, i in plan.environment.installed.items()}
    lost = binder.replaced_targets()
    patches = {
        id: replace(_state(decision, plan, binder, failed, lost), holds=held.get(id, ()))
        for id, decision in plan.decisions.items()
    }
    fine = ("called", "kept", "released")
    left_alone = tuple(str(item) for item in binder.places.replaced_now() if binder.effect_of(item) not in fine)
    left_alone += tuple(f"{slot} holds shim's object again, which somebody has put back" for slot in binder.put_back())
    return Report(patches, plan, releases, left_alone)


def not_applied(plan: Plan) -> Plan:
    """The plan to report on if nothing is applied."""
    reason = "shim.apply() has not been called in this process, or was reverted"
    excluded = {
        id: replace(decision, action="excluded", reason=reason)
        for id, decision in plan.decisions.items()
        if decision.wanted
    }
    return replace(plan, decisions={**plan.decisions, **excluded})
