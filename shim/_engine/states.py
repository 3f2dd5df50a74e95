"""Step 5, verify: the state of each patch. This module alone makes one, from what it reads back and from claims.

`read_report` reads the process. What other modules find besides, on a model (models.py) or of
bodies that a patch relies on (foreign.py), they say as a `Claim`, and `States` decides what becomes of the state.
"""

from __future__ import annotations

from collections.abc import Mapping

from shim._compatible import marks_of
from shim._engine.chains import Records
from shim._engine.names import Replaced, describe, replaced_by, unwrap
from shim._engine.report import (
    PatchReport,
    Report,
    remedy_for,
    remedy_in_doubt,
    remedy_untried,
    switched_off,
)
from shim._planning.plan import Decision, Plan
from shim._record import record, replace
from shim._releases.fingerprint import split_target

__all__ = ["Claim", "States", "UNSETTLED", "not_applied", "read_report"]

# The states of a patch that is wanted, and that nothing is known to keep from its effect.
UNSETTLED = ("applied", "pending", "idle", "unknown")
NOT_TOLD = "it cannot be told whether"


def _replaced_by(state: str) -> tuple[str, ...]:
    """The states that a claim of `state` replaces, so that the first claim of a state is the one that is told."""
    if state == "applied":
        return ("unknown",)
    return UNSETTLED if state in ("shadowed", "conflict") else ("applied",)


@record
class Claim:
    """What was found about a patch, besides what stands on its targets.

    state: what the patch is by that; "" if it keeps its state. "applied" is said of one target, and of the patch if
        nothing else about it is unknown.
    text: the reason of the state; beside "" and "applied" a sentence for `others`, which takes the place of the one
        that begins with `about`.
    target, mark: a target, and how it stands by that.
    replaces: the states that this claim replaces; () for the usual ones of its state.
    """

    patch: str
    state: str
    text: str
    remedy: str = ""
    target: str = ""
    mark: str = ""
    about: str = ""
    replaces: tuple[str, ...] = ()


class States:
    """The states of a report, to which claims are added."""

    def __init__(self, report: Report, plan: Plan, binder: Records) -> None:
        self._report, self._plan, self._binder = report, plan, binder
        self._patches = dict(report.patches)

    def __getitem__(self, id: str) -> PatchReport:
        return self._patches[id]

    def report(self) -> Report:
        return replace(self._report, patches=self._patches)

    def add(self, claim: Claim) -> None:
        patch = self[claim.patch]
        if not claim.state:
            if claim.text not in patch.others:
                self._patches[patch.id] = replace(patch, others=(*patch.others, claim.text))
            return
        replaced = claim.replaces or _replaced_by(claim.state)
        if claim.state == "applied":
            others = (*(text for text in patch.others if not text.startswith(claim.about)), claim.text)
            patch = self._patches[patch.id] = replace(patch, targets=_marked(patch, claim), others=others)
            if patch.state in replaced and {"untried", "unknown"}.isdisjoint(patch.targets.values()):
                state, reason, remedy = _bound(self._plan[patch.id], self._binder)
                self._patches[patch.id] = replace(patch, state=state, reason=reason, remedy=remedy)
        elif patch.state in replaced:
            self._patches[patch.id] = replace(
                patch, state=claim.state, reason=claim.text, remedy=claim.remedy, targets=_marked(patch, claim)
            )


def _marked(patch: PatchReport, claim: Claim) -> Mapping[str, str]:
    return {**patch.targets, claim.target: claim.mark} if claim.target else patch.targets


def _state(
    decision: Decision, plan: Plan, binder: Records, failed: Mapping[str, str], overridden: Mapping[str, Replaced]
) -> PatchReport:
    entry = plan.matrix.patches[decision.id]
    summary = entry.summary

    def report(state: str, reason: str, targets: Mapping[str, str] | None = None, remedy: str = "") -> PatchReport:
        return PatchReport(decision.id, decision.kind, state, reason, decision.variant, targets or {}, remedy, summary)

    def off(options: Mapping[str, object], why: str, targets: Mapping[str, str]) -> PatchReport | None:
        """A patch that is switched off loses nothing by a foreign object in its place."""
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
    targets = {target: _on(target, decision, binder, overridden) for target in decision.targets}
    targets.update(dict.fromkeys(decision.dropped, "drifted"))
    skippable = {} if decision.wiring is None else decision.wiring.skippable
    others = tuple(_others(decision, targets, binder, overridden))
    replaced = [target for target, state in targets.items() if state == "lost" and target not in skippable]
    if replaced:  # and there was no search since: conflicts are found before a report is made
        who, slot = _who(overridden[replaced[0]]), overridden[replaced[0]].slot
        reason = f"{replaced[0]}: {slot} {replaced_by(slot.current())}, which does not call shim's function"
        return off(decision.options, reason, targets) or report(
            "conflict", reason, targets, remedy_for(decision.id, who)
        )
    waiting = {state: _modules_of(targets, state) for state in ("pending", "idle")}
    if waiting["pending"]:
        made = report("pending", f"waits for the import of {waiting['pending']}; {decision.reason}", targets)
    elif targets and set(targets.values()) == {"idle"}:  # `applied` is said of nothing that is not bound
        reason = f"waits for {waiting['idle']}, which this process may do without; {decision.reason}"
        made = report("idle", reason, targets)
    elif unknown := [target for target, state in targets.items() if state == "unknown"]:
        who = _who(overridden[unknown[0]])
        reason = f"{NOT_TOLD} {who} calls shim's function on {unknown[0]}, which it holds"
        made = report("unknown", reason, targets, remedy_in_doubt(decision.id, who))
    elif untried := [question for key, question in binder.found.open.items() if key[0] == decision.id]:
        reason = f"{NOT_TOLD} {untried[0].who}, which replaces {untried[0].method}, has the effect of the patch"
        made = report("unknown", reason, targets, remedy_untried(untried[0].method, untried[0].who))
        made = off(decision.options, decision.reason, targets) or made
    else:
        state, reason, remedy = _bound(decision, binder)
        made = report(state, reason, targets, remedy)
    return replace(made, others=others)


def _bound(decision: Decision, binder: Records) -> tuple[str, str, str]:
    """State, reason and remedy of a patch whose targets all stand as they should.

    The reason says what is known of the bodies in the files, and which functions run in their place.
    """
    if decision.id in binder.found.doubts:
        what = binder.found.doubts[decision.id]
        return "unknown", f"{NOT_TOLD} {what}", f"exclude {decision.id}, or test whether it has its effect"
    around = [(target, binder.found.around.get((decision.id, target))) for target in decision.targets]
    told = [f"{target} is {who}, which takes the same arguments" for target, who in around if who is not None]
    return "applied", "; but ".join([decision.reason, *told]), ""


def _modules_of(targets: Mapping[str, str], state: str) -> str:
    return ", ".join(dict.fromkeys(split_target(target)[0] for target, found in targets.items() if found == state))


def _who(overridden: Replaced) -> str:
    return describe(unwrap(overridden.slot.current()))


def _on(target: str, decision: Decision, binder: Records, overridden: Mapping[str, Replaced]) -> str:
    """How a target stands: bound, called by a foreign object, lost or left to it, kept by it, unknown, or waiting."""
    if (decision.id, target) in binder.found.open:
        return "untried"
    if target in decision.skipped:
        return "left" if decision.skipped[target] else "kept"
    if target in overridden:
        effect = binder.effect_of(overridden[target])
        return "lost" if effect == "replaced" else effect
    if binder.bound(decision.id, target):
        return "bound"
    return "idle" if target in decision.optional else "pending"


def _others(
    decision: Decision, targets: Mapping[str, str], binder: Records, overridden: Mapping[str, Replaced]
) -> list[str]:
    """What other people's objects on the targets do, one sentence each."""
    found = [*decision.parts_left]
    for target, state in targets.items():
        around = binder.found.around.get((decision.id, target))
        if state == "untried":
            question = binder.found.open[decision.id, target]
            found.append(f"{question.method} is replaced by {question.who}")
        elif around is not None:
            found.append(f"{target} is replaced by {around}; the patch goes around it")
        elif state == "called":
            found.append(f"{target} is wrapped by {_who(overridden[target])}, which calls shim's")
        elif state == "kept":
            theirs = overridden[target].slot.current() if target in overridden else binder.resolve(target)[2]
            marked = marks_of(theirs).get(target, "")
            found.append(f"{describe(unwrap(theirs))} says that it keeps {target}, as of shim {marked}")
        elif state in ("left", "lost") and decision.wiring is not None and target in decision.wiring.skippable:
            who = decision.skipped.get(target) or _who(overridden[target])
            found.append(f"{target} is replaced by {who}: {decision.wiring.skippable[target]}")
    read = [question for (id, body), question in binder.found.open.items() if id == decision.id and body not in targets]
    return [*found, *(f"{question.method} is replaced by {question.who}" for question in read)]


def read_report(plan: Plan, binder: Records, failed: Mapping[str, str], held: Mapping[str, tuple[str, ...]]) -> Report:
    """The report of this moment. A patch is "applied" only if it was read back. `held`: see PatchReport.holds."""
    releases = {name: i.raw or "unknown" for name, i in plan.environment.installed.items()}
    overridden = binder.replaced_targets()
    patches = {
        id: replace(
            _state(decision, plan, binder, failed, overridden),
            holds=held.get(id, ()),
            symptom=plan.matrix.patches[id].symptom,
            changes=plan.matrix.patches[id].changes,
            without=plan.matrix.patches[id].without,
        )
        for id, decision in plan.decisions.items()
    }
    fine = ("called", "kept", "released")
    left_alone = tuple(str(item) for item in binder.replaced_now() if binder.effect_of(item) not in fine)
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
