"""Plans and reports as text: a headline, then the patches in groups that a reader can act on."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from shim._matrix.concerns import WORDS
from shim._matrix.model import DISTRIBUTIONS, SYMPTOMS, Matrix, PatchEntry
from shim._planning.decision import Decision
from shim._planning.losses import LostFeature
from shim._planning.relevance import NO, UNKNOWN, UNSAID, YES, Run
from shim._printing.printable import one_line
from shim._record import record
from shim._releases.detect import Environment

__all__ = [
    "Row",
    "concern_line",
    "effects_of",
    "group",
    "grouped",
    "headline",
    "list_text",
    "listed",
    "nothing_installed",
    "plan_text",
]

MORE_WORDS = 8  # that a plan suggests
FEW = 8  # ids that a line names; of more it gives the number
LONG = 8000  # characters of a reason, which may name many targets
AMISS = ("drifted", "conflict", "failed", "shadowed")
NOT_NEEDED = ("upstream", "not-needed", "not-installed")


@record
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
    symptom: str = ""
    changes: str = ""
    concern: str = ""  # YES, NO or UNKNOWN (relevance.py) of a run that something is known of, else ""
    not_known: tuple[str, ...] = ()  # the words that an UNKNOWN one depends on
    without: str = ""  # what goes wrong without the patch
    in_part: bool = False  # a target is left out, or lost, that the patch can do without


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

_WHAT = {  # what goes wrong without a patch: once and more often in a headline, and over a section
    "silent": ("silent error", "silent errors", "silently wrong results"),
    "crash": ("crash", "crashes", "errors in a build, a step, a save or a load"),
    "hang": ("hang", "hangs", "runs that wait for ever"),
    "memory": ("use of memory", "uses of memory", "more memory than the model needs"),
    "missing": ("missing feature", "missing features", "a feature or a speed that the release lacks"),
}
_APPLIED = {f"applied {symptom}": f"Fixed: {_WHAT[symptom][2]}" for symptom in SYMPTOMS}
_APPLIED["applied "] = "{Applied}:"  # of a matrix that does not say
_TITLES = {
    "problem": "Problems:",
    "stuck": "Not applied, because their modules cannot be imported here:",
    **_APPLIED,
    "open": "{Applied}, and of concern if the words behind the summary hold, which is not known:",
    "features": "Features {applied}, without effect until you use them (by a flag, an option or a call):",
    "unknown": "In doubt, because shim cannot tell whether they have their effect:",
    "waiting": "Waiting until their modules are imported:",
    "idle": "Idle, until an optional module is imported:",
}
_IN_A_LINE = {
    "elsewhere": "{Applied}, and irrelevant to {run}",
    "upstream": "Not needed, because this release has fixed the defect",
    "not-needed": "Not needed, because this release lacks the defect or the feature",
    "excluded": "Left out",
    "out-of-range": "For other releases",
    "not-installed": "Nothing to patch",
}
_HEADER = ("patch", "changes", "what shim does")


def headline(rows: Sequence[Row], applied: str, more_problems: int = 0) -> str:
    """For instance "8 patches applied: 6 fix silent errors, 2 crashes; 5 not needed here, 0 problems"."""

    def count(*groups: str) -> int:
        return sum(row.group in groups for row in rows)

    number = count("applied", "features")
    in_part = sum(row.in_part for row in rows)
    first = (
        f"{_patches(number)} {_verb(number, applied)}{f', {in_part} of them in part' if in_part else ''}{_fixes(rows)}"
    )
    others = {
        "unknown": "in doubt",
        "waiting": "waiting for an import",
        "idle": "idle",
        "excluded": "left out",
        "out-of-range": "for other releases",
    }
    parts = [f"{count(group)} {what}" for group, what in others.items() if count(group)]
    problems = count("problem", "stuck") + more_problems
    parts += [f"{count(*NOT_NEEDED)} not needed here", f"{problems} problem{'' if problems == 1 else 's'}"]
    return f"{first}; {', '.join(parts)}"


def _fixes(rows: Sequence[Row]) -> str:
    counts = Counter(row.symptom for row in rows if row.group == "applied" and row.symptom)
    parts = [f"{counts[s]} {one if counts[s] == 1 else many}" for s, (one, many, _) in _WHAT.items() if counts[s]]
    if not parts:
        return ""
    number, _, what = parts[0].partition(" ")
    features = sum(row.group == "features" for row in rows)
    parts[0] = f"{number} {'fixes a' if number == '1' else 'fix'} {what}"
    parts += [f"{features} feature{'' if features == 1 else 's'}"] if features else []
    return f": {', '.join(parts)}"


def _by_symptom(rows: Sequence[Row]) -> str:
    counts = Counter(row.symptom for row in rows if row.group == "applied" and row.symptom)
    parts = [f"{counts[s]} {s}" for s in SYMPTOMS if counts[s]]
    return f" ({', '.join(parts)})" if parts else ""


def concern_line(rows: Sequence[Row], run: str, named: bool = False) -> str:
    """For instance "12 of 43 concern a run with packed, lora (9 silent, 3 crash); 2 more may". `named`: with ids."""
    applied = [row for row in rows if row.group == "applied"]
    sure = [row for row in applied if row.concern == YES]
    counts = _by_symptom(sure)
    if named and sure:
        ids = {symptom: ", ".join(row.id for row in sure if row.symptom == symptom) for symptom in SYMPTOMS}
        counts = ": " + "; ".join(f"{symptom}: {those}" for symptom, those in ids.items() if those)
    line = f"{len(sure)} of {len(applied)} concern{'s' if len(sure) == 1 else ''} {run}{counts}"
    more = sum(row.concern == UNKNOWN for row in applied)
    return f"{line}; {more} more may" if more else line


def grouped(rows: Sequence[Row], applied: str, verbose: bool, run: str = "") -> Iterable[str]:
    """The patches in sections. run: the run that `concern` of the rows is about, in words."""
    width = max((len(row.id) for row in rows), default=0)
    sections = [_section(row) for row in rows]
    header = any(section in _APPLIED for section in sections)
    for section, title in _TITLES.items():
        members = [row for row, its in zip(rows, sections) if its == section]
        if not members:
            continue
        yield from ["", title.format(applied=applied, Applied=applied.capitalize())]
        if header and section in _APPLIED:
            header = False
            yield f"  {_HEADER[0]:<{width}}  {_HEADER[1]:<8}  {'without it' if members[0].concern else _HEADER[2]}"
        for row in members:
            changes = f"{row.changes:<8}  " if section in (*_APPLIED, "open") else ""
            about = f" ({row.state})" if section == "problem" else " (in part)" if row.in_part else ""
            words = [row.symptom, ", ".join(row.not_known)]
            about += f" [{': '.join(filter(None, words))}]" if section == "open" and any(words) else ""
            # A run that is known asks what would go wrong, and one that is not what there is.
            what = row.without if changes and row.concern and row.without else row.summary
            yield f"  {row.id:<{width}}  {changes}{one_line(what)}{about}"
            yield from _more_of(row, verbose, section in ("problem", "unknown"))
    for section, title in _IN_A_LINE.items():
        members = [row for row, its in zip(rows, sections) if its == section]
        title = title.format(Applied=applied.capitalize(), run=run)
        yield from _in_a_line(title, section, members, verbose, width, applied)


def _section(row: Row) -> str:
    if row.group in ("applied", "features") and row.concern == NO:
        return "elsewhere"
    if row.group != "applied":
        return row.group
    return "open" if row.concern == UNKNOWN else f"applied {row.symptom}"


def _more_of(row: Row, verbose: bool, with_reason: bool) -> Iterable[str]:
    yield from (f"      changes {one_line(text)}" for text in row.effects)
    if verbose and row.variant:
        yield f"      variant {row.variant} of {one_line(', '.join(row.targets), LONG)}"
    if verbose or with_reason:
        yield f"      {one_line(row.reason, LONG)}"
    if row.remedy:
        yield f"      Remedy: {one_line(row.remedy, LONG)}"
    yield from (f"      keeps {one_line(text)}" for text in row.holds)
    yield from (f"      beside it: {one_line(text)}" for text in row.others)


def _in_a_line(
    title: str, section: str, members: Sequence[Row], verbose: bool, width: int, applied: str
) -> Iterable[str]:
    """Patches that do nothing here: their ids, or how many there are of them."""
    if members and section in ("elsewhere", *NOT_NEEDED[:2]):
        if not verbose and section == "elsewhere":
            others = f"{len(members)} other{'' if len(members) == 1 else 's'}"
            yield from ["", f"{others} {_verb(len(members), applied)} (-v)"]
            return
        if not verbose:
            many = len(members) > FEW
            yield from [
                "",
                f"{title}: {f'{_patches(len(members))} (-v)' if many else ', '.join(row.id for row in members)}.",
            ]
            return
        yield from ["", f"{title}:"]
        for row in members:
            yield f"  {row.id:<{width}}  {one_line(row.summary)}"
            yield from _more_of(row, True, True)
        return
    for reason in dict.fromkeys(row.reason for row in members):
        ids = [row.id for row in members if row.reason == reason]
        named = section == "excluded" or verbose
        yield from ["", f"{title}: {one_line(reason)} ({', '.join(ids) if named else _patches(len(ids))})."]


def _verb(number: int, applied: str) -> str:
    """applied: "applied" in a report, "to apply" in a plan."""
    return "applied" if applied == "applied" else "applies" if number == 1 else "apply"


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
    run: Run | None = None,
) -> str:
    """The text of a plan, with what the releases get wrong together and lose. `verbose` adds all reasons.

    run: what is known of the run that is to be trained; patches that concern it come first.
    """
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
            in_part=d.wanted and bool(d.dropped),
            symptom=matrix.patches[id].symptom,
            changes=matrix.patches[id].changes,
            concern=run.concern_of(matrix.patches[id].concerns) if run is not None and d.wanted else "",
            without=matrix.patches[id].without,
            not_known=run.missing_words(matrix.patches[id].concerns) if run is not None else (),
        )
        for id, d in decisions.items()
    ]
    installed = environment.installed.values()
    problems = [f"  ! {i.distribution}: {one_line(problem)}" for i in installed for problem in i.problems]
    missing = nothing_installed(environment)
    lines = [missing] if missing else [headline(rows, "to apply", len(problems))]
    lines += [concern_line(rows, run.words)] if run is not None and not missing else []
    lines += [f"  {note}" for note in run.notes] if run is not None else []
    lines += _with_one_word_more(decisions, matrix, run) if run is not None and not missing else []
    lines += [f"  {i}" for i in installed]
    lines += problems
    if missing and not verbose:
        return "\n".join(lines)
    lines.append(f"  plan {digest}")
    lines += grouped(rows, "to apply", verbose, run.words if run is not None else "")
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


def _with_one_word_more(decisions: Mapping[str, Decision], matrix: Matrix, run: Run) -> list[str]:
    """How many patches each further word of --for would add, if the run is named by such words."""
    if not WORDS.keys() <= run.facts.keys():
        return []
    wanted = [matrix.patches[id] for id, decision in decisions.items() if decision.wanted]
    counts = Counter(word for entry in wanted for word in run.words_that_would(entry.concerns) if word not in UNSAID)
    if not counts:
        return []
    words = ", ".join(f"{word} ({n})" for word, n in counts.most_common(MORE_WORDS))
    return [f"  also relevant if you use {words}"]


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
