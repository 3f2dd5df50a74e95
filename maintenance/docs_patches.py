"""docs/patches.md and the page of each patch: from the matrix, the patch's header, its proofs and their results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shim._matrix.model import KINDS, Matrix, PatchEntry
from shim._planning.texts import effects_of, patch_docstring
from shim._tools.listing import listed

from .docs_defects import ProofText, numbers, proof_texts
from .docs_links import linked

__all__ = ["patch_page", "patches_page", "tested_on"]

INDEX = """\
# Patches

Written for a release, from version_matrix.yaml; `shim list` prints the same of this checkout.

Each patch has a page with its defect, what came out on each release, the command that shows it, what the patch does,
and the names that it binds. [defects.md](defects.md) has the same patches by what goes wrong. "Changes" says what a
patch does to the numbers of a run: nothing, rounding, or values.
"""
PROOFS = """\
## See it

`shim prove {id}` runs this on your machine, on stock and with the patch
([prove.md](../prove.md)). The tables have what came out on the supported releases, on a CPU.
"""


def tested_on(matrix: Matrix) -> list[str]:
    """Sentences about the supported releases and commits."""
    supported = [
        f"{name} {found[0]} to {found[-1]} ({len(found)} releases)" for name, found in matrix.supported.items()
    ]
    lines = [f"Tested on {' and '.join(supported)}."]
    commits = [(name, commit) for name, found in matrix.commits.items() for commit in found.values()]
    lines += [
        f"Also tested on the sources of {name} {commit.version} ({commit.of}), because there is no wheel of it."
        for name, commit in commits
        if commit.tagged
    ]
    known = [f"{name} {commit.name} ({commit.of})" for name, commit in commits if not commit.tagged]
    if known:
        lines.append(f"Pinned to commits as well: {', '.join(known)}.")
    return lines


def _where(matrix: Matrix, id: str) -> str:
    """The distribution, and its releases or commits that get the patch."""
    patch = listed(matrix)[id]
    return f"{patch['distribution']} {patch['releases'] or _commits_with(matrix, id)}"


def _commits_with(matrix: Matrix, id: str) -> str:
    """The commits that get a patch which no release needs."""
    commits = matrix.commits.get(matrix.patches[id].distribution, {})
    getting = [commit.name for commit in commits.values() if matrix.wanted(id, commit.name) not in (None, "upstream")]
    return f"at commit {', '.join(getting)}" if getting else "of no known release"


def patches_page(matrix: Matrix) -> str:
    """The text of docs/patches.md."""
    lines = [INDEX, *tested_on(matrix), ""]
    for kind in KINDS:
        entries = [entry for entry in matrix.patches.values() if entry.kind == kind]
        if entries:
            lines += [
                f"## {kind.capitalize()}",
                "",
                "| patch | what it does | changes | releases |",
                "|---|---|---|---|",
            ]
        lines += [
            f"| [{entry.id}](patches/{entry.id}.md) | {entry.summary} | {entry.changes} | {_where(matrix, entry.id)} |"
            for entry in entries
        ]
        lines += [""] if entries else []
    return "\n".join(lines).rstrip() + "\n"


def patch_page(matrix: Matrix, proved: Mapping[str, Any], entry: PatchEntry) -> str:
    """The text of docs/patches/ID.md."""
    lines = [f"# {entry.id}", "", f"{entry.summary[0].upper()}{entry.summary[1:]}.", ""]
    lines += ["| kind | changes | releases | code |", "|---|---|---|---|"]
    lines += [f"| {entry.kind} | {entry.changes} | {_where(matrix, entry.id)} | {_code(entry)} |", ""]
    effects = [f"- {effect}." for effect in effects_of(entry)]
    lines += [*effects, ""] if effects else []
    lines += ["## What is wrong, and what the patch does", "", patch_docstring(entry), ""]
    texts = proof_texts(entry)
    lines += [PROOFS.format(id=entry.id)] if texts else []
    for text in texts:
        lines += [*_proof(matrix, proved, text), ""]
    lines += ["## What it binds", "", *_bound(entry), ""]
    more = [
        f"Outside of [{id}]({id}.md), which binds a target that it binds: {why}" for id, why in entry.outside_of.items()
    ]
    more += [f"Cost: {entry.cost}"] if entry.cost else []
    more += [f"Option `{o.name}`, by default `{o.default}`: {o.takes}" for o in entry.declared.values()]
    more += [f"Acts before the code of {_codes(entry.before)} runs"] if entry.before else []
    lines += [*(f"- {line}" for line in more), ""] if more else []
    said = [linked(reference) for reference in entry.references] + [
        f"Reported in {linked(who)}" for who in entry.met_by
    ]
    lines += ["## Upstream", "", *(f"- {line}" for line in said)] if said else []
    return "\n".join(lines).rstrip() + "\n"


def _code(entry: PatchEntry) -> str:
    """A link to the folder of the patch; its module, if it is none of shim's."""
    inside = entry.module.removeprefix("shim.")
    folder = inside.replace(".", "/")
    return f"[{folder}](../../{folder}/__init__.py)" if inside != entry.module else f"`{entry.module}`"


def _proof(matrix: Matrix, proved: Mapping[str, Any], text: ProofText) -> Iterator[str]:
    """A section: what is wrong, how to see it without shim, and what came out."""
    yield from (f"### {text.name}", "", text.reproduction, "")
    yield from numbers(matrix, proved, text)


def _bound(entry: PatchEntry) -> Iterator[str]:
    """A table with a line for each rule, and for each variant of commits alone."""
    yield from ("| releases | variant | binds | relies on |", "|---|---|---|---|")
    for rule in entry.rules:
        ranges = "; ".join(f"{name} {spec}" for name, spec in rule.ranges.items())
        if rule.variant is None:
            yield f"| {ranges} | {rule.right} | {rule.note} | |"
            continue
        variant = entry.variants[rule.variant]
        yield f"| {ranges} | {rule.variant} | {_names(variant.targets)} | {_names(variant.depends_on)} |"
    ruled = {rule.variant for rule in entry.rules}
    for name, variant in entry.variants.items():
        if name not in ruled:
            yield f"| commits | {name} | {_names(variant.targets)} | {_names(variant.depends_on)} |"


def _names(targets: Iterable[str]) -> str:
    return _codes(target.partition(":")[2] for target in targets)


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
