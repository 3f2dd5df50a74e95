"""Step 6, report: one state and one reason per patch, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from shim._printing.printable import one_line
from shim._record import record

if TYPE_CHECKING:
    from shim._planning.plan import Plan
    from shim._printing.overview import Row

__all__ = ["PatchReport", "Report", "STATES", "switched_off"]


MODEL = "this model"  # what `concerns` is about


def switched_off(id: str, names: tuple[str, ...]) -> tuple[str, str]:
    """Why a patch whose switches `names` are off has no effect, and the remedy."""
    several = len(names) > 1
    reason = f"the options {' and '.join(names)} are off" if several else f"the option {names[0]} is off"
    return reason, f"set {'one' if several else 'it'} by shim.apply(options={{{id!r}: {{{names[0]!r}: True}}}})"


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
        return {**self.__dict__, "plan": _Identified(self.digest)}

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
        counts = Counter(patch.state for patch in self.patches.values())
        states = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]) or "no patches"
        releases = ", ".join(f"{name} {version}" for name, version in self.releases.items()) or "nothing installed"
        return f"shim: {states} on {releases} (digest {self.digest})"

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
        from shim._printing.overview import concern_line

        rows = self._rows(False)
        return concern_line(rows, MODEL, named=True) if any(row.concern for row in rows) else ""

    def _rows(self, pending_is_amiss: bool) -> list[Row]:
        from shim._printing.overview import Row, group  # here and below, because apply() writes no text

        return [
            Row(
                id,
                group(p.state, p.kind, pending_is_amiss),
                p.state,
                p.summary,
                p.reason,
                p.remedy,
                p.variant,
                p.targets,
                p.holds,
                p.others,
                symptom=p.symptom,
                changes=p.changes,
                without=p.without,
                concern=p.concerns,
                not_known=p.not_known,
                in_part=p.is_partial and p.state == "applied",
            )
            for id, p in self.patches.items()
        ]

    def text(self, verbose: bool = False, pending_is_amiss: bool = False) -> str:
        """The report for people. `verbose` adds the reason of every state.

        pending_is_amiss: nothing will be imported any more, so a pending or unknown patch is a problem.
        """
        from shim._printing.overview import concern_line, grouped, headline

        rows = self._rows(pending_is_amiss)
        releases = ", ".join(f"{name} {version}" for name, version in self.releases.items()) or "nothing installed"
        lines = [headline(rows, "applied", len(self.lost)), f"  on {releases} (digest {self.digest})"]
        if any(row.concern for row in rows):
            lines.insert(1, concern_line(rows, MODEL))
        lines += [f"  ! {one_line(item)}" for item in self.lost]
        return "\n".join([*lines, *grouped(rows, "applied", verbose, MODEL)])

    def __str__(self) -> str:
        return self.text()
