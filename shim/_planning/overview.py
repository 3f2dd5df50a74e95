"""Plans and reports as text: a headline, then the patches in groups that a reader can act on."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shim._matrix.model import DISTRIBUTIONS, Matrix, PatchEntry
from shim._planning.decision import Decision
from shim._planning.losses import LostFeature
from shim._printing.printable import one_line
from shim._releases.detect import Environment

__all__ = ["Row", "effects_of", "group", "grouped", "headline", "list_text", "listed", "nothing_installed", "plan_text"]

LONG = 8000  # characters of a reason, which may name many targets
AMISS = ("drifted", "conflict", "failed", "shadowed")
NOT_NEEDED = ("upstream", "not-needed", "not-installed")


@dataclass(frozen=True)
class Row:
    """One line of the text: a patch. `group` is what `group` returns."""

    id: str
    group: str
    state: str
    summary: str
    reason: str
    remedy: str
    variant: str | None
    targets: Mapping[str, str]
    holds: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()


def group(state: str, kind: str, pending_is_amiss: bool) -> str:
    if state == "pending":
        return "stuck" if pending_is_amiss else "waiting"
    if state == "unknown":
        return "problem" if pending_is_amiss else "unknown"
    if state in AMISS or (state == "inactive" and kind != "feature"):
        return "problem"
    if state in ("apply", "applied", "inactive"):
        return "features" if kind == "feature" else "applied"
    return state


# Text

_TITLES = {
    "problem": "Problems:",
    "stuck": "Not applied, because their modules cannot be imported here:",
    "applied": "{Applied}:",
    "features": "Features {applied}, without effect until you use them (by a flag, an option or a call):",
    "unknown": "In doubt, because shim cannot tell whether they have their effect:",
    "waiting": "Waiting until their modules are imported:",
    "idle": "Idle, until an optional module is imported:",
    "upstream": "Not needed, because this release has fixed the defect:",
    "not-needed": "Not needed, because this release lacks the defect or the feature:",
}
_IN_A_LINE = {"excluded": "Left out", "out-of-range": "For other releases", "not-installed": "Nothing to patch"}


def headline(rows: Sequence[Row], applied: str, more_problems: int = 0) -> str:
    """For instance "8 applied, 2 left out, 5 not needed here, 0 problems"."""

    def count(*groups: str) -> int:
        return sum(row.group in groups for row in rows)

    parts = [f"{count('applied', 'features')} {applied}"]
    others = {
        "unknown": "in doubt",
        "waiting": "waiting for an import",
        "idle": "idle",
        "excluded": "left out",
        "out-of-range": "for other releases",
    }
    parts += [f"{count(group)} {what}" for group, what in others.items() if count(group)]
    problems = count("problem", "stuck") + more_problems
    parts += [f"{count(*NOT_NEEDED)} not needed here", f"{problems} problem{'' if problems == 1 else 's'}"]
    return ", ".join(parts)


def grouped(rows: Sequence[Row], applied: str, verbose: bool) -> Iterable[str]:
    width = max((len(row.id) for row in rows), default=0)
    for group, title in _TITLES.items():
        members = [row for row in rows if row.group == group]
        if members:
            yield ""
            yield title.format(applied=applied, Applied=applied.capitalize())
        for row in members:
            state = f" ({row.state})" if group == "problem" else ""
            yield f"  {row.id:<{width}}  {one_line(row.summary)}{state}"
            yield from (f"      changes {one_line(text)}" for text in row.effects)
            if verbose and row.variant:
                yield f"      variant {row.variant} of {one_line(', '.join(row.targets), LONG)}"
            if verbose or group in ("problem", "unknown"):
                yield f"      {one_line(row.reason, LONG)}"
            if row.remedy:
                yield f"      Remedy: {one_line(row.remedy, LONG)}"
            yield from (f"      keeps {one_line(text)}" for text in row.holds)
            yield from (f"      beside it: {one_line(text)}" for text in row.others)
    for group, title in _IN_A_LINE.items():
        members = [row for row in rows if row.group == group]
        for reason in dict.fromkeys(row.reason for row in members):
            ids = [row.id for row in members if row.reason == reason]
            named = group == "excluded" or verbose
            yield from ["", f"{title}: {one_line(reason)} ({', '.join(ids) if named else _patches(len(ids))})."]


def _patches(count: int) -> str:
    return f"{count} patch{'' if count == 1 else 'es'}"


def plan_text(
    decisions: Mapping[str, Decision],
    matrix: Matrix,
    environment: Environment,
    digest: str,
    wrong_pairs: Sequence[tuple[str, str]],
    lost_features: Sequence[LostFeature],
    pair_is_known: bool | None,
    verbose: bool = False,
) -> str:
    """The text of a plan, with what the releases get wrong together and lose. `verbose` adds all reasons."""
    rows = [
        Row(
            id,
            group(d.action, d.kind, False),
            d.action,
            matrix.patches[id].summary,
            d.reason,
            d.remedy,
            d.variant if d.wanted else None,
            dict.fromkeys(d.targets, ""),
            others=d.parts_left,
            effects=effects_of(matrix.patches[id]) if d.wanted else (),
        )
        for id, d in decisions.items()
    ]
    installed = environment.installed.values()
    problems = [f"  ! {i.distribution}: {one_line(problem)}" for i in installed for problem in i.problems]
    missing = nothing_installed(environment)
    lines = [missing] if missing else [headline(rows, "to apply", len(problems))]
    lines += [f"  {i}" for i in installed]
    lines += problems
    if missing and not verbose:
        return "\n".join(lines)
    lines.append(f"  plan {digest}")
    lines += grouped(rows, "to apply", verbose)
    if wrong_pairs:
        lines += ["", "Defects of this megatron-core with this Transformer Engine, which a patch fixes:"]
    lines += [f"  {id:<27} {one_line(what)}" for id, what in wrong_pairs]
    if lost_features:
        lines += ["", "Features that this megatron-core does not get from this Transformer Engine:"]
    lines += [f"  {feature.verdict:<13} {one_line(feature)}" for feature in lost_features]
    if pair_is_known is False:
        lines += [
            "",
            "Lost features of this pair of releases were not measured; shim doctor searches its sources.",
        ]
    return "\n".join(lines)


def effects_of(entry: PatchEntry) -> tuple[str, ...]:
    """The effects of a patch with several, each with its kind; () if `changes` says it all."""
    return tuple(f"{kind}: {what}" for kind, what in (entry.effects or {}).items())


def nothing_installed(environment: Environment) -> str:
    """A sentence and a remedy for a machine without anything to patch. "" if a distribution is installed."""
    if any(name in environment.installed for name in DISTRIBUTIONS):
        return ""
    python = one_line(sys.executable)
    return (
        f"Neither {' nor '.join(DISTRIBUTIONS)} is installed for {python}, so there is nothing to patch. "
        "Remedy: run shim with the Python of the trainer (python -m shim), or put the source tree on PYTHONPATH."
    )


# All patches, whatever is installed


def listed(matrix: Matrix) -> dict[str, dict[str, str]]:
    """`kind`, `summary`, `changes` and `distribution` of each patch by id, and the supported `releases` that get it."""
    found = {}
    for id, entry in matrix.patches.items():
        pins = matrix.pins.get(entry.distribution, {})
        getting = [r for r in matrix.supported.get(entry.distribution, ()) if _gets(pins.get(r, {}).get(id))]
        found[id] = {
            "kind": entry.kind,
            "summary": entry.summary,
            "changes": entry.changes,
            "distribution": entry.distribution,
            "releases": f"{getting[0]} to {getting[-1]}" if len(getting) > 1 else "".join(getting),
        }
    return found


def _gets(pin: object) -> bool:
    return getattr(pin, "variant", None) is not None


def list_text(matrix: Matrix) -> str:
    """The text of `shim list`: all patches with their summaries, by kind."""
    patches = listed(matrix)
    width = max(map(len, patches), default=0)
    lines = [f"{_patches(len(patches))}; shim explain ID says more of one, shim plan which are needed here."]
    for kind in dict.fromkeys(patch["kind"] for patch in patches.values()):
        lines += ["", f"{kind}:"]
        for id, patch in patches.items():
            if patch["kind"] == kind:
                where = f" ({patch['distribution']} {patch['releases']})" if patch["releases"] else ""
                lines.append(f"  {id:<{width}}  {one_line(patch['summary'])}{where}")
    return "\n".join(lines)
