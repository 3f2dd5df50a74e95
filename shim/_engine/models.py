"""Step 5, verify: whether bound patches take effect on a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shim._compatible import marks_of
from shim._engine.aliases import namespace_of, unwrap
from shim._engine.chain import Chain
from shim._engine.checked import Checked
from shim._engine.copies import with_copies
from shim._engine.overrides import Override, calls, overrides_of
from shim._engine.questions import with_answers
from shim._engine.reach import is_releases_own, leads_to
from shim._engine.records import Records
from shim._engine.report import NOT_KNOWN, PatchReport, Report, switched_off
from shim._engine.stale_references import stale_references
from shim._engine.tries import Tries, of_patch
from shim._errors import ShimError
from shim._planning.plan import Decision, Plan
from shim._record import Record, replace
from shim._releases.fingerprint import split_target

__all__ = ["with_findings"]


class Finding(Record):
    """What an override in the models does to a patch.

    state: "" where the patch keeps its effect, "shadowed" where the override hides it, NOT_KNOWN where nobody knows.
    remedy: "" for the usual one of the state.
    """

    patch: str
    target: str
    state: str
    text: str
    remedy: str = ""


def with_findings(
    report: Report, models: list[Any], plan: Plan, binder: Records, checked: Checked, *, raising: bool
) -> Report:
    """The report, with what overrides in these models do to the patches. Called without the engine's lock.

    raising: whether this is check(). Only check() raises an error in a patch's own check, where a report says that the
        patch is inactive. And only check() tries overrides: another thread may train while a report is made.
    """
    tries = Tries(plan, models, checked.verdicts, raising)
    patches = with_answers(dict(report.patches), models, plan, binder, tries)
    for id, what, remedy in _problems_in(models, plan, raising):
        if patches[id].state == "applied":
            patches[id] = replace(patches[id], state="inactive", reason=what, remedy=remedy)
    for found in _findings_in(models, plan, binder, tries):
        patches[found.patch] = _with(patches[found.patch], found, plan.matrix.patches[found.patch].without)
    return replace(report, patches=with_copies(patches, models, plan))


def _with(patch: PatchReport, found: Finding, without: str) -> PatchReport:
    if not found.state:
        fresh = found.text not in patch.others
        return replace(patch, others=(*patch.others, found.text)) if fresh else patch
    # Hidden outranks not known, and the first finding of a state is the one that is told.
    covers = ("applied", "pending") if found.state == "shadowed" else ("applied",)
    if patch.state not in covers:
        return patch
    targets = {**patch.targets, found.target: found.state}
    if found.state == "shadowed":
        reason = f"{found.target}: {found.text}" + (f"; {without}" if without else "")
        return replace(patch, state="shadowed", reason=reason, targets=targets, remedy=CALL_IT)
    return replace(
        patch, state="pending", reason=f"{NOT_KNOWN}: {found.text}", targets=targets, remedy=found.remedy or FIND_OUT
    )


CALL_IT = "call the method of the base class in the override, or drop the override"
EARLIER = "call shim.apply() before the model is built"
FIND_OUT = (
    "call the method of the base class in the override; or, where a test shows that the override trains right, mark it "
    "with shim.compatible(TARGET)"
)


def _problems_in(models: list[Any], plan: Plan, raising: bool) -> Iterator[tuple[str, str, str]]:
    """Triples (patch, why it has no effect on the models, remedy), from switches and from `problems` of patches."""
    for decision in plan.decisions.values():
        off = plan.matrix.patches[decision.id].off_by(decision.options) if decision.wanted else ()
        if off:
            yield decision.id, *switched_off(decision.id, off)
            continue
        find = of_patch(decision, plan, "problems") if decision.wanted else None
        try:
            for what, remedy in find(models) if find is not None else ():
                yield decision.id, what, remedy
        except ShimError as error:
            if raising:
                raise
            yield decision.id, str(error), ""


def _findings_in(models: list[Any], plan: Plan, binder: Records, tries: Tries) -> Iterator[Finding]:
    """What each override of a patched method does, and each override of a method that reaches a patched function."""
    instances = [module for item in models for module in item.modules()]
    for taken in stale_references(instances, plan, binder):
        text = f"{taken.place} holds upstream's own {taken.target.partition(':')[2]}, taken before shim bound it"
        yield Finding(taken.patch, taken.target, NOT_KNOWN, text, f"set {taken.place} again, or {EARLIER}")
    for decision in plan.decisions.values():
        for target in decision.targets if decision.wanted else ():
            chain = binder.chains.get(target)
            if chain is None or binder.loaded(split_target(target)[0]) is None:
                continue
            now = unwrap(namespace_of(chain.owner).get(chain.name))
            mended = tuple(value for value in (unwrap(chain.top), now) if value is not None)
            for method, owner in _ways_to(chain, decision, binder):
                seen: set[Any] = set()
                judge = _Judge(decision, target, method, tries)
                for module in instances:
                    if isinstance(module, owner):
                        found = judge.of(module, owner, mended)
                        yield from (item for item in found if item not in seen)
                        seen.update(found)


def _ways_to(chain: Chain, decision: Decision, binder: Records) -> Iterator[tuple[str, type]]:
    """The methods whose overrides may hide the object on a target, each with its class."""
    if isinstance(chain.owner, type):
        yield chain.target, chain.owner
    for method in decision.wiring.reached_by.get(chain.target, ()) if decision.wiring else ():
        owner: Any = binder.loaded(split_target(method)[0])
        for part in split_target(method)[1].split(".")[:-1]:
            owner = None if owner is None else namespace_of(owner).get(part)
        if isinstance(owner, type):
            yield method, owner


class _Judge:
    """Judges the overrides of one method on one way to a target of a patch."""

    def __init__(
        self,
        decision: Decision,
        target: str,
        method: str,
        tries: Tries,
    ) -> None:
        self.id, self.target, self.method = decision.id, target, method
        self.decision, self.tries = decision, tries

    def of(self, module: Any, owner: type, mended: tuple[Any, ...]) -> list[Finding]:
        name = self.method.rpartition(".")[2]
        direct = self.method == self.target
        below = mended[0] if direct else unwrap(namespace_of(owner).get(name))
        found: list[Finding] = []
        for override in overrides_of(module, owner, name, below):
            if direct and override.function in mended:
                break
            marks = marks_of(override.function)
            marked = next((marks[key] for key in (self.target, self.method) if key in marks), None)
            if marked is not None:
                text = f"{override.does}, and says that it keeps {self.target}, as of shim {marked}"
                return [*found, self._finding("", text)]
            if calls(override, mended if direct else (below,)):
                if not is_releases_own(override.function):
                    found.append(self._finding("", f"{override.does} and calls it"))
                continue
            tried = self._tried(module, override)
            # What an override names may still get the wrong arguments, so trying it comes before reading it.
            if tried.state == NOT_KNOWN and not direct and leads_to(override.function, mended):
                tried = self._finding("", f"{override.does} and calls {self.target.partition(':')[2]}")
            return found if is_releases_own(override.function) and not tried.state else [*found, tried]
        return found

    def _finding(self, state: str, text: str) -> Finding:
        return Finding(self.id, self.target, state, text)

    def _tried(self, module: Any, override: Override) -> Finding:
        verdict, why = self.tries.of(self.decision, self.method, module, override.function)
        text = f"{override.does} without calling it"
        if verdict is None:
            return self._finding(NOT_KNOWN, f"{text}, and {why or 'nobody knows what becomes of the patch'}")
        if verdict:
            return self._finding("", f"{text}; on this model the patch loses nothing by it")
        return self._finding("shadowed", f"{text}, and keeps the patch from its effect")
