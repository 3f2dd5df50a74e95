"""docs/defects.md and its picture: what each proof shows on each release, as recorded."""

from __future__ import annotations

import ast
import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shim._matrix.model import Matrix, PatchEntry
from shim._releases.sources import Sources

from .docs_links import short
from .docs_picture import Row, bars, table

__all__ = [
    "ProofText",
    "defects_page",
    "defects_picture",
    "numbers",
    "proof_texts",
    "releases_picture",
    "symptom_of",
]

ENDINGS = (".proof", ".gpu_proof")  # as in shim.testing.proof, whose import would import torch
INTRODUCTION = """\
# Defects

Written for a release, from the proofs and their results, which lie beside the patches. `make proofs` measures them on
every supported release of megatron-core, each beside a release of Transformer Engine of its time.

`shim prove` shows the same on your machine, for what is installed there: on stock, and with the patch.

What goes wrong on stock, and how:

- **silent**: numbers are wrong, and nothing says so.
- **crash**, **hang**: the run ends or stands still.
- **memory**, **time**: it takes more than it needs.
- **missing**: a release lacks what others have.

"Wrong on" has the releases on which stock was seen to be wrong, and right with the patch. "Others" are **right** on
stock, or were **not run**, because that needs a GPU or something that the release does not have. The last column has
the command that shows the defect. Each line leads to the page of its patch, with the numbers, a reproduction without
shim, and who met the defect. The picture behind the table has the state of each release.

"""
PICTURE = """\
![Each defect on each release: stock wrong and fixed, upstream right, or not to be run without a GPU](defects.svg)

[explore.html](explore.html) shows the defects of two releases that hit a certain run: on the site, and in a checkout
after `make docs-all`."""
TABLE = """\
| defect | kind | wrong on | others | upstream | reproduce |
|---|---|---|---|---|---|"""
STATES = {"fixed": "", "upstream": "right", "cannot run": "not run"}  # verdict -> word


@dataclass(frozen=True)
class ProofText:
    """A proof as its file says it. It is read as text, because importing it would import torch.

    label: the id of the patch, with the proof's name if the patch has several. keywords: those of @proof that are
    literals.
    """

    label: str
    patch: str
    name: str
    reproduction: str
    keywords: Mapping[str, Any]


def proof_texts(entry: PatchEntry) -> list[ProofText]:
    """The proofs of a patch in the order of their file; empty if it has none."""
    sources = Sources()
    there = [name for name in (f"{entry.module}{ending}" for ending in ENDINGS) if sources.path(name) is not None]
    nodes = [node for module in there for node in sources.tree(module).body]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and _made(node)]
    names = [node.name.replace("_", "-") for node in functions]
    return [
        ProofText(
            entry.id if len(names) == 1 else f"{entry.id}/{name}",
            entry.id,
            name,
            ast.get_docstring(node) or "",
            dict(_literals(_made(node))),
        )
        for name, node in zip(names, functions, strict=True)
    ]


def _literals(keywords: list[ast.keyword]) -> Iterator[tuple[str, Any]]:
    for keyword in keywords:
        with contextlib.suppress(ValueError):  # a name, such as that of a pattern that proofs share
            yield keyword.arg or "", ast.literal_eval(keyword.value)


def _made(node: ast.FunctionDef) -> list[ast.keyword]:
    """The keywords of @proof(...); none if the function is no proof."""
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "proof":
            # `bound` and others may be left out, so one keyword stands for the fact itself.
            return [*decorator.keywords, ast.keyword("is_proof", ast.Constant(True))]
    return []


def defects_picture(matrix: Matrix, proved: Mapping[str, Any]) -> str:
    """The SVG: releases across, defects down. Proofs of a patch that came out alike share a row."""
    releases = [release for release in matrix.supported["megatron-core"] if release in proved]
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for entry in matrix.patches.values():
        for text in proof_texts(entry):
            verdicts = tuple(_verdict(proved[release], text.label) for release in releases)
            rows.setdefault((entry.id, verdicts), []).append(text.label)
    found = [Row(patch, tuple(labels), verdicts) for (patch, verdicts), labels in rows.items()]
    return table(releases, found, "What each proof shows on each release of megatron-core")


def releases_picture(matrix: Matrix, proved: Mapping[str, Any]) -> str:
    """The SVG for README: how many defects each release has, by what goes wrong."""
    texts = [text for entry in matrix.patches.values() for text in proof_texts(entry)]
    counts = {
        release: Counter(symptom_of(text) for text in texts if _verdict(proved[release], text.label) == "fixed")
        for release in matrix.supported["megatron-core"]
        if release in proved
    }
    return bars(counts, "Defects of each megatron-core release that shim fixes, as measured")


def symptom_of(text: ProofText) -> str:
    """One of the symptoms of a patch. Time counts as memory: it takes more than it needs."""
    defect: str = text.keywords.get("defect", "silent")
    return "memory" if defect == "time" else defect


def _verdict(found: Mapping[str, Any], label: str) -> str:
    return found["proofs"].get(label, {}).get("verdict", "")


def defects_page(matrix: Matrix, proved: Mapping[str, Any]) -> str:
    """The text of docs/defects.md."""
    texts = [text for entry in matrix.patches.values() for text in proof_texts(entry)]
    rows = (_row(matrix, proved, text) for text in texts)
    return "\n".join([INTRODUCTION + TABLE, *rows, "", PICTURE]) + "\n"


def _row(matrix: Matrix, proved: Mapping[str, Any], text: ProofText) -> str:
    """The line of a proof in the table of all defects."""
    entry = matrix.patches[text.patch]
    first = text.reproduction.splitlines()[0] if text.reproduction else ""
    wrong, others = _where(matrix, proved, text)
    cells = [
        f"[{first}](patches/{text.patch}.md#{text.name})",
        text.keywords.get("defect", "silent"),
        wrong,
        others,
        "; ".join(map(short, entry.references)),
        f"`shim prove {text.patch}`",
    ]
    return f"| {' | '.join(cells)} |"


def _where(matrix: Matrix, proved: Mapping[str, Any], text: ProofText) -> tuple[str, str]:
    """On which releases stock is wrong, and what the others are."""
    if matrix.patches[text.patch].distribution == "transformer-engine":
        return _of_transformer_engine(matrix, text.patch), ""
    releases = [release for release in matrix.supported["megatron-core"] if release in proved]
    verdicts = [(release, _verdict(proved[release], text.label)) for release in releases]
    runs = {state: _runs(releases, {r for r, verdict in verdicts if verdict == state}) for state in STATES}
    others = "; ".join(f"{word}: {runs[state]}" for state, word in STATES.items() if word and runs[state])
    return runs["fixed"] or "none that was run", others


def _of_transformer_engine(matrix: Matrix, id: str) -> str:
    """The releases of Transformer Engine that get the patch, because its proofs run beside one of each time only."""
    releases = matrix.supported["transformer-engine"]
    pins = {release: matrix.pins["transformer-engine"][release].get(id) for release in releases}
    patched = {release for release, pin in pins.items() if pin is not None and pin.variant is not None}
    return f"Transformer Engine {_runs(releases, patched)}"


def _runs(releases: Sequence[str], chosen: Collection[str]) -> str:
    """ "0.12.0 to 0.15.3, 0.17.0": the chosen ones of the releases, neighbours together."""
    runs: list[list[str]] = []
    for before, release in zip(("", *releases), releases):
        if release in chosen and before in chosen and runs:
            runs[-1].append(release)
        elif release in chosen:
            runs.append([release])
    return ", ".join(map(_span, runs))


def numbers(matrix: Matrix, proved: Mapping[str, Any], text: ProofText) -> Iterator[str]:
    """A line for each run of releases on which the same came out."""
    runs: list[tuple[list[str], tuple[str, str, str]]] = []
    for release in matrix.supported["megatron-core"]:
        found = proved.get(release, {}).get("proofs", {}).get(text.label)
        if found is None:
            continue
        row = (found["stock"], found["with_shim"], found["verdict"])
        name = release
        if text.keywords.get("te") or matrix.patches[text.patch].distribution == "transformer-engine":
            name = f"{release} + {proved[release]['transformer-engine']}"
        if runs and runs[-1][1] == row:
            runs[-1][0].append(name)
        else:
            runs.append(([name], row))
    if not runs:
        return
    yield from ("| megatron-core | stock | with shim | |", "|---|---|---|---|")
    for names, (stock, patched, verdict) in runs:
        yield f"| {_span(names)} | {_cell(stock)} | {_cell(patched)} | {verdict} |"


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
