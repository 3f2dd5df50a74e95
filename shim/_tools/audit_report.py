"""An audit for people: text for a terminal, Markdown for a pull request. Text from the tree is escaped."""

from __future__ import annotations

from collections import Counter

from shim._matrix.model import RIGHT
from shim._printing.markdown import escaped_html, fence_of, plain
from shim._printing.printable import one_line, printable
from shim._tools.audit import Audit, Difference

__all__ = ["as_markdown", "as_text"]


def as_text(found: Audit) -> str:
    """The audit for a terminal."""
    lines = [f"audit of {one_line(found.tree.name)}"]
    lines += [f"  commit {found.tree.commit}"] if found.tree.commit else []
    lines += [f"  {one_line(str(installed))}" for installed in found.tree.environment.installed.values()]
    lines += [f"  beside {one_line(str(installed))}" for installed in found.beside]
    lines += [_totals(found), ""]
    width = max([16, *(len(finding.words) for finding in found.findings)])
    for finding in sorted(found.findings, key=lambda finding: not finding.amiss):
        lines.append(f"  {finding.words:<{width}}  {finding.id}: {one_line(finding.reason)}")
        for difference in finding.differences:
            lines += [f"    {_role(difference)} {difference.target}: {one_line(_why(difference))}"]
            lines += [f"      {printable(line, '')}" for line in difference.diff]
    lines += [f"  lost name: {one_line(name)}" for name in found.lost]
    lines += [f"  ! {one_line(note)}" for note in found.notes]
    return "\n".join(lines)


def _totals(found: Audit) -> str:
    counts = Counter(finding.verdict for finding in found.findings)
    parts = [f"{count} {verdict}" for verdict, count in counts.most_common()]
    parts += [f"{len(found.lost)} lost names"] if found.lost else []
    return f"  {', '.join(parts)}; " + ("nothing to do" if found.clean else "what has to be looked at comes first")


def as_markdown(found: Audit) -> str:
    """The audit for a pull request: a table, and below it the differences, folded up."""
    audited = ", ".join(i.release for i in found.tree.environment.installed.values())
    audited += f", commit {found.tree.commit[:10]}" if found.tree.commit else ""
    audited += "".join(f", beside {i.release}" for i in found.beside)
    lines = [
        f"### shim audit: {plain(audited)}",
        "",
        _totals(found).strip(),
        "",
        "| patch | verdict | |",
        "|---|---|---|",
    ]
    ordered = sorted(found.findings, key=lambda finding: not finding.amiss)
    lines += [f"| {f.id} | {f.words} | {plain(f.reason)} |" for f in ordered]
    right = [finding.id for finding in found.findings if finding.verdict in RIGHT]
    if right:
        lines += [
            "",
            f"This release is right without these patches, so gates for them can go: {', '.join(right)}.",
        ]
    for finding in found.findings:
        for difference in finding.differences:
            why = escaped_html(one_line(_why(difference)))
            summary = f"{finding.id} {_role(difference)} <code>{difference.target}</code>: {why}"
            lines += ["", f"<details><summary>{summary}</summary>", ""]
            if difference.diff:
                diff = [printable(line, "") for line in difference.diff]
                lines += [f"{fence_of(diff)}diff", *diff, fence_of(diff)]
            lines += ["</details>"]
    if found.lost:
        lines += ["", "Names that megatron-core imports and this release lacks:", ""]
        lines += ["| name | wanted by megatron-core | |", "|---|---|---|"]
        lines += [f"| `{n.name}` | {plain(n.wanted)} | {plain(n.whereabouts)} |" for n in found.lost]
    lines += ["", *[f"- {plain(note)}" for note in found.notes]] if found.notes else []
    return "\n".join(lines)


def _role(difference: Difference) -> str:
    return "binds" if difference.bound else "relies on"


def _why(difference: Difference) -> str:
    start = f" (from {difference.nearest})" if difference.nearest else ""
    return f"{difference.why}{start}"
