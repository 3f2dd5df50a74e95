"""Step 6, report: one state and one reason per patch, as text and as JSON; warnings, remedies, models checked."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from shim._errors import NotMetError
from shim._printing.printable import one_line
from shim._record import record
from shim._releases.fingerprint import split_target

if TYPE_CHECKING:
    from shim._planning.decision import Decision
    from shim._planning.plan import Plan
    from shim._printing.overview import Row

__all__ = [
    "Checked",
    "PatchReport",
    "Report",
    "STATES",
    "is_method",
    "is_tried",
    "remedy_for",
    "remedy_in_doubt",
    "remedy_untried",
    "require_none",
    "switched_off",
    "warnings_for",
]


MODEL = "this model"  # what `concerns` is about


def switched_off(id: str, names: tuple[str, ...]) -> tuple[str, str]:
    """Why a patch whose switches `names` are off has no effect, and the remedy."""
    several = len(names) > 1
    reason = f"the options {' and '.join(names)} are off" if several else f"the option {names[0]} is off"
    return reason, f"set {'one' if several else 'it'} by shim.apply(options={{{id!r}: {{{names[0]!r}: True}}}})"


_SHOWN = (  # what stands in a row of the text as in the report
    *("state", "summary", "reason", "remedy", "variant", "targets", "holds", "others"),
    *("symptom", "changes", "without", "not_known"),
)
STATES = (
    "applied",
    "upstream",
    "not-needed",
    "not-installed",
    "out-of-range",
    "excluded",
    "not-concerned",
    "inactive",
    "pending",
    "idle",
    "unknown",
    "drifted",
    "conflict",
    "shadowed",
    "failed",
)


@record
class PatchReport:
    """The state of one patch. `targets` maps each target to ``bound``, ``pending`` or another state."""

    id: str
    kind: str
    state: str
    reason: str
    variant: str | None = None
    targets: Mapping[str, str] = field(default_factory=dict)
    remedy: str = ""
    summary: str = ""  # what the patch does
    holds: tuple[str, ...] = ()  # what it holds in the process besides its functions, in words
    others: tuple[str, ...] = ()  # what other people's code does to it without hiding it, in words
    symptom: str = ""  # what goes wrong without it: silent, crash, hang, memory or missing
    changes: str = ""  # its effect on a run: nothing, rounding or values
    without: str = ""  # what goes wrong, in a sentence
    concerns: str = ""  # whether it concerns the models of check(): "yes", "no", "unknown", or "" without a model
    not_known: tuple[str, ...] = ()  # the words that would decide an "unknown", such as "packed"

    @property
    def is_partial(self) -> bool:
        """Whether a target that the patch can do without holds foreign code, or has an unknown body or effect."""
        if self.state not in ("applied", "pending", "idle", "unknown"):
            return False
        return not {"left", "lost", "untried", "drifted"}.isdisjoint(self.targets.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "summary": self.summary,
            "state": self.state,
            "reason": self.reason,
            "variant": self.variant,
            "targets": dict(self.targets),
            "in_part": self.is_partial,
            "remedy": self.remedy,
            "holds": list(self.holds),
            "others": list(self.others),
            "symptom": self.symptom,
            "changes": self.changes,
            "concerns": self.concerns,
            "not_known": list(self.not_known),
        }


@record
class _Identified:
    """What a report that left its process has in the place of its plan."""

    digest: str
    numbers: str


@record
class Report:
    """The states of all patches at one moment. ``report["id"].state`` is one of STATES.

    `releases` are the versions that the plan was made for. `lost` lists names that other code has replaced since
    shim wrote them.
    """

    patches: Mapping[str, PatchReport]
    plan: Plan | _Identified = field(compare=False, repr=False)
    releases: Mapping[str, str]
    lost: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """The digest of the plan; ranks compare it.

        Made on demand: it reads the code of all patches, which takes a tenth of an apply().
        """
        return self.plan.digest

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return vars(self) | {"plan": self.digest} == vars(other) | {"plan": other.digest}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "plan": _Identified(self.digest, self.plan.numbers)}

    def __getitem__(self, id: str) -> PatchReport:
        return self.patches[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self.patches)

    def __len__(self) -> int:
        return len(self.patches)

    @property
    def applied(self) -> tuple[str, ...]:
        """Ids of the applied patches, read back as bound."""
        return tuple(id for id, patch in self.patches.items() if patch.state == "applied")

    @property
    def summary(self) -> str:
        """One line: how many patches are in which state, on what, and the digest."""
        return f"shim: {self.counted} (digest {self.digest})"

    @property
    def counted(self) -> str:
        """The same without the digest, which reads all files of shim."""
        counts = Counter(patch.state for patch in self.patches.values())
        states = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]) or "no patches"
        return f"{states} {self._on}"

    @property
    def _on(self) -> str:
        releases = ", ".join(f"{name} {version}" for name, version in self.releases.items())
        return f"on {releases or 'nothing installed'}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "summary": self.summary,
            "digest": self.digest,
            "releases": dict(self.releases),
            "applied": list(self.applied),
            "patches": {id: patch.to_dict() for id, patch in self.patches.items()},
            "lost": list(self.lost),
        }

    @property
    def concern(self) -> str:
        """One line: which of the applied patches concern the models of check(), by symptom. "" without a model."""
        if not any(patch.concerns for patch in self.patches.values()):
            return ""
        from shim._printing.overview import concern_line

        return concern_line(self._rows(False), MODEL, named=True)

    def _rows(self, pending_is_amiss: bool) -> list[Row]:
        from shim._printing.overview import Row, group  # here and below, because apply() writes no text

        return [
            Row(
                id,
                group(p.state, p.kind, pending_is_amiss),
                concern=p.concerns,
                in_part=p.is_partial and p.state == "applied",
                **{name: getattr(p, name) for name in _SHOWN},
            )
            for id, p in self.patches.items()
        ]

    def text(self, verbose: bool = False, pending_is_amiss: bool = False) -> str:
        """The report for people. `verbose` adds the reason of every state.

        pending_is_amiss: nothing will be imported any more, so a pending or unknown patch is a problem.
        """
        from shim._printing.overview import concern_line, grouped, headline

        rows = self._rows(pending_is_amiss)
        lines = [headline(rows, "applied", len(self.lost)), f"  {self._on} (digest {self.digest})"]
        if any(row.concern for row in rows):
            lines.insert(1, concern_line(rows, MODEL))
        lines += [f"  {self.plan.numbers}", *(f"  ! {one_line(item)}" for item in self.lost)]
        return "\n".join([*lines, *grouped(rows, "applied", verbose, MODEL)])

    def __str__(self) -> str:
        return self.text()


# Warnings and remedies


def is_method(name: str) -> bool:
    """Whether ``module:qualname`` is an attribute of a class."""
    return "." in split_target(name)[1]


def is_tried(target: str, decision: Decision, plan: Plan) -> bool:
    """Whether the patch has a way to try a foreign function on a target."""
    return target in plan.matrix.patches[decision.id].probe


def remedy_in_doubt(id: str, who: str) -> str:
    """The remedy for an object whose calls are unknown."""
    return f"let {who} call the original function from one of its own variables, or exclude {id}"


def remedy_for(id: str, who: str) -> str:
    """The remedy for an object that does a patch's work in another way."""
    return f"remove {who} (the patch replaces it), or keep it and exclude {id}"


def remedy_untried(name: str, who: str) -> str:
    """The remedy for an object in the place of `name` that only a trial can judge, of a method one in a model."""
    return f"call shim.check({'model' if is_method(name) else ''}), which tries {who} on a tiny input"


def require_none(plan: Plan, module: str | None) -> None:
    """NotMetError if a required patch of this just imported module is in conflict.

    None: no import. What others have done since apply() is for check() to raise, and not for a report.
    """
    for id in plan.options.require:
        decision = plan[id]
        if decision.action == "conflict" and module in decision.modules:
            raise NotMetError(f"required, but {id} is in conflict: {decision.reason}. Remedy: {decision.remedy}.")


def warnings_for(plan: Plan) -> Iterator[tuple[str, str, str, str]]:
    """For each correctness patch that is not applied, as a whole or on some target: patch, state, reason, warning.

    All patches that have drifted are one warning: on a fork there are many, and one command decides them all.
    """
    correcting = [decision for decision in plan.decisions.values() if decision.kind == "correctness"]
    drifted = [decision for decision in correcting if decision.action == "drifted"]
    if drifted:
        ids = ", ".join(decision.id for decision in drifted)
        is_one = len(drifted) == 1
        who, are = (drifted[0].id, "is") if is_one else (f"{len(drifted)} patches", "are")
        said = drifted[0].reason if is_one else f"{ids}. `shim explain ID` has the reason of each"
        without = plan.matrix.patches[drifted[0].id].without if is_one else ""
        needed = f" If this tree needs it: {without}." if without else ""
        text = f"{who} {are} not applied (drifted): {said}.{needed} Remedy: {_remedies(drifted)}."
        yield who, "drifted", drifted[0].reason if is_one else ids, text
    yield from _in_part([decision for decision in correcting if decision.dropped])
    for decision in correcting:
        if decision.action == "conflict":
            text = (
                f"{decision.id} is not applied (conflict): {decision.reason}. "
                f"{_stays_wrong(plan, decision.id)}Remedy: {decision.remedy}."
            )
            yield decision.id, decision.action, decision.reason, text
        skippable = {} if decision.wiring is None else decision.wiring.skippable
        for target, who in ((target, who) for target, who in decision.skipped.items() if who):
            text = f"{decision.id} is applied without {target}, which holds {who}. "
            if is_tried(target, decision, plan):
                text += f"It is not known whether that has the effect of the patch: {remedy_untried(target, who)}."
                yield decision.id, "not tried", f"without {target}", text
            elif target in skippable:
                text += f"Unless that does the same: {skippable[target]}. Remedy: {remedy_for(decision.id, who)}."
                yield decision.id, "applied in part", f"without {target}", text


def _in_part(decisions: list[Decision]) -> Iterator[tuple[str, str, str, str]]:
    """One warning for all patches of which bodies are not known that they can do without."""
    if not decisions:
        return
    if len(decisions) == 1:
        [decision] = decisions
        skippable = {} if decision.wiring is None else decision.wiring.skippable
        without, whys = ", ".join(decision.dropped), "; ".join(decision.dropped.values())
        wrong = "; ".join(skippable[target] for target in decision.dropped)
        said = f"{decision.id} is applied without {without}: {whys}. If this tree needs it: {wrong}"
        who = decision.id
    else:
        who, without = f"{len(decisions)} patches", ", ".join(decision.id for decision in decisions)
        said = f"{who} are applied in part: {without}. `shim explain ID` says without what"
    yield who, "applied in part", f"without {without}", f"{said}. Remedy: {_remedies(decisions)}."


def _remedies(drifted: list[Decision]) -> str:
    """The remedies of patches that have drifted, each once, with its patches unless they share it."""
    found: dict[str, list[str]] = {}
    for decision in drifted:
        found.setdefault(decision.remedy, []).append(decision.id)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"of {', '.join(ids)}: {remedy}" for remedy, ids in found.items())


def _stays_wrong(plan: Plan, id: str) -> str:
    """Whether the object in the patch's place does what the patch does was not tried."""
    entry = plan.matrix.patches[id]
    return f"Unless that does the same: {entry.without}. " if entry.without else f"Missing: {entry.summary}. "


# The models that were checked last, and what trying their overrides has shown


class Checked:
    """The models of the last check(), as weak references, so that none is kept alive.

    Findings are not remembered. Each report examines the models anew, so it neither shows an override that is gone nor
    misses a target that another plan has bound. Only what probes said of an override is kept, by the patch, by the
    override's code, and by what else the verdict may depend on.
    """

    def __init__(self) -> None:
        self._models: list[weakref.ref[Any]] = []
        self.verdicts: dict[Any, tuple[bool | None, str]] = {}  # see models.py

    def remember(self, models: list[Any]) -> None:
        # What an override calls may have changed since, and its code has not.
        self.verdicts = {}
        # A class with slots may forbid weak references; a torch module never does.
        self._models = [weakref.ref(model) for model in models if hasattr(type(model), "__weakref__")]

    def living(self) -> list[Any]:
        return [model for model in (reference() for reference in self._models) if model is not None]
