"""Patches as text: a headline, then groups that a reader can act on. For plans and reports, which make the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from shim._printing.printable import one_line
from shim._record import record

__all__ = ["MORE", "Row", "concern_line", "group", "grouped", "headline", "patches"]

MORE = " more (-v)"  # ends a line that stands for patches which are not named
FEW = 8  # ids that a line names; of more it gives the number
LONG = 8000  # characters of a reason, which may name many targets
AMISS = ("drifted", "conflict", "failed", "shadowed")
NOT_NEEDED = ("upstream", "not-needed", "not-installed")
FEATURE = "feature"
YES, NO, UNKNOWN = "yes", "no", "unknown"  # whether a patch concerns a run, as shim._matrix.concerns says it


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
    concern: str = ""  # YES, NO or UNKNOWN of a run that something is known of, else ""
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
_APPLIED = {f"applied {symptom}": f"Fixed: {_WHAT[symptom][2]}" for symptom in _WHAT}
_APPLIED["applied "] = "{Applied}:"  # of a matrix that does not say
_TITLES = {
    "problem": "Problems:",
    "stuck": "Not applied, because their modules cannot be imported here:",
    **_APPLIED,
    "open": "{Applied}, and of concern if the words behind the summary hold, which is not known:",
    "features": "Features {applied}, without effect until you use them:",
    "unknown": "In doubt, because shim cannot tell whether they have their effect:",
    "waiting": "Waiting until their modules are imported:",
    "idle": "Idle, until an optional module is imported:",
}
_IN_A_LINE = {
    "elsewhere": "{Applied}, and irrelevant to {run}",
    "upstream": "Not needed, because this release has fixed the defect",
    "not-needed": "Not needed, because this release lacks the defect or the feature",
    "excluded": "Left out",
    "not-concerned": "Of no concern to this run",
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
        f"{patches(number)} {_verb(number, applied)}{f', {in_part} of them in part' if in_part else ''}{_fixes(rows)}"
    )
    others = {
        "unknown": "in doubt",
        "waiting": "waiting for an import",
        "idle": "idle",
        "excluded": "left out",
        "not-concerned": "of no concern to this run",
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


def _kind_of(row: Row) -> str:
    """The symptom that a patch fixes, or FEATURE."""
    return FEATURE if row.group == "features" else row.symptom


def _by_symptom(rows: Sequence[Row]) -> str:
    counts = Counter(map(_kind_of, rows))
    parts = [f"{counts[s]} {s}" for s in _WHAT if counts[s]]
    parts += [f"{counts[FEATURE]} feature{'' if counts[FEATURE] == 1 else 's'}"] if counts[FEATURE] else []
    return f" ({', '.join(parts)})" if parts else ""


def concern_line(rows: Sequence[Row], run: str, named: bool = False) -> str:
    """Behind a headline: "12 of them concern a run with packed, lora (9 silent, 3 crash); 2 more may".

    named: with ids.
    """
    applied = [row for row in rows if row.group in ("applied", "features")]
    sure = [row for row in applied if row.concern == YES]
    counts = _by_symptom(sure)
    if named and sure:
        ids = {what: ", ".join(row.id for row in sure if _kind_of(row) == what) for what in (*_WHAT, FEATURE)}
        counts = ": " + "; ".join(f"{what}: {those}" for what, those in ids.items() if those)
    line = f"{len(sure)} of {'those applied' if named else 'them'} concern{'s' if len(sure) == 1 else ''} {run}{counts}"
    more = sum(row.concern == UNKNOWN for row in applied)
    return f"{line}; {more} more may" if more else line


def grouped(
    rows: Sequence[Row], applied: str, verbose: bool, run: str = "", most: int | None = None, needed: bool = False
) -> Iterable[str]:
    """The patches in sections. run: the run that `concern` of the rows is about, in words.

    most: how many patches the sections of silent errors and of crashes name, of which there are many; the others that
    have no problems name one, and the rest is counted.
    Without `verbose` it says what goes wrong without a patch, else what the patch does.
    needed: leave out those that are not needed here, which the headline counts.
    """
    width = max((len(row.id) for row in rows), default=0)
    sections = [_section(row) for row in rows]
    header = verbose and any(section in _APPLIED for section in sections)
    for section, title in _TITLES.items():
        members = [row for row, its in zip(rows, sections) if its == section]
        if not members:
            continue
        title = title.format(applied=applied, Applied=applied.capitalize())
        if section == "features" and not (verbose or any(row.remedy or row.holds or row.others for row in members)):
            yield from ["", f"{title} {', '.join(row.id for row in members)}"]
            continue
        yield from ["", title]
        if header and section in _APPLIED:
            header = False
            yield f"  {_HEADER[0]:<{width}}  {_HEADER[1]:<8}  {_HEADER[2]}"
        few = most if section in ("applied silent", "applied crash", "applied ") else 1
        named = members if most is None or section not in (*_APPLIED, "features") else members[:few]
        for row in named:
            applies = section in (*_APPLIED, "open")
            changes = f"{row.changes:<8}  " if applies and verbose else ""
            about = f" ({row.state})" if section == "problem" else " (in part)" if row.in_part else ""
            words = [row.symptom, ", ".join(row.not_known)]
            about += f" [{': '.join(filter(None, words))}]" if section == "open" and any(words) else ""
            what = row.without if applies and not verbose and row.without else row.summary
            # A column of ids would leave half of 80 columns to the text.
            yield f"  {f'{row.id:<{width}} ' if verbose else f'{row.id}:'} {changes}{one_line(what)}{about}"
            yield from _more_of(row, verbose, section in ("problem", "unknown"))
        if len(named) < len(members):
            yield f"  and {len(members) - len(named)}{MORE}"
    for section, title in _IN_A_LINE.items():
        if needed and section in NOT_NEEDED:
            continue
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
    if verbose:
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
    if members and section == "not-concerned" and not verbose:
        yield from ["", f"{title}: {patches(len(members))} (-v)."]
        return
    if members and section in ("elsewhere", *NOT_NEEDED[:2]):
        if not verbose and section == "elsewhere":
            others = f"{len(members)} other{'' if len(members) == 1 else 's'}"
            yield from ["", f"{others} {_verb(len(members), applied)} (-v)"]
            return
        if not verbose:
            many = len(members) > FEW
            yield from [
                "",
                f"{title}: {f'{patches(len(members))} (-v)' if many else ', '.join(row.id for row in members)}.",
            ]
            return
        yield from ["", f"{title}:"]
        for row in members:
            yield f"  {row.id:<{width}}  {one_line(row.summary)}"
            yield from _more_of(row, True, True)
        return
    for reason in dict.fromkeys(row.reason for row in members):
        ids = [row.id for row in members if row.reason == reason]
        named = verbose or (section == "excluded" and len(ids) <= FEW)  # MEGATRON_SHIM_DISABLE leaves out all
        yield from ["", f"{title}: {one_line(reason)} ({', '.join(ids) if named else patches(len(ids))})."]


def _verb(number: int, applied: str) -> str:
    """applied: "applied" in a report, "to apply" in a plan."""
    return "applied" if applied == "applied" else "applies" if number == 1 else "apply"


def patches(count: int) -> str:
    return f"{count} patch{'' if count == 1 else 'es'}"
