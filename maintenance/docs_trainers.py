"""docs/trainers.md, from docs/trainers.yaml: what trainers do to megatron-core, and what shim has to do with it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from shim._errors import MatrixError
from shim._matrix.model import Matrix
from shim._matrix.reader import Reader, compose
from shim._releases.versions import parse_range

if TYPE_CHECKING:
    import yaml

__all__ = ["PINS", "VERDICTS", "Edit", "Item", "Trainer", "edited", "problems", "read_trainers", "trainers_page"]

# Verdict -> what it means for the maintainer of a trainer.
VERDICTS = {
    "unnecessary": "shim does it. The lines can be deleted once shim is applied.",
    "composes": "It does something else in the same place. Both hold, in the given order.",
    "conflicts": "It keeps a patch of shim from its effect, in whole or in part. The row names the consequence.",
    "own": "Unrelated to shim. It is only counted.",
}
PINS = "trainers_pins.json"  # beside the data: what shim.maintenance.trainer_pins has found
AUDITED = {
    "apply": "apply",
    "upstream": "are fixed there",
    "not-needed": "are not needed",
    "drifted": "are drifted and do nothing",
    "gone": "are of functions that are gone there",
}
ORDERS = ("either order", "shim first", "trainer first")


@dataclass(frozen=True)
class Item:
    """One patch, gate, probe or copied function of a trainer."""

    at: str  # file:line or file:from-to, below the trainer's folder
    name: str  # what stands there
    does: str
    verdict: str
    releases: Mapping[str, str] = field(default_factory=dict)  # distribution -> range in which it has a use
    patches: tuple[str, ...] = ()  # shim's patches that make it unnecessary, or that it meets
    instead: str = ""  # a public function of shim to call in its place
    order: str = ""
    note: str = ""
    seen: tuple[str, ...] = ()  # tests that saw it run


@dataclass(frozen=True)
class Edit:
    """One change of a trainer's sources. Lines are those of the version that was read."""

    file: str
    first: int
    last: int  # 0: nothing is deleted, and what is added comes before the line `first`
    add: str = ""


@dataclass(frozen=True)
class Trainer:
    """One trainer, as it was read."""

    name: str
    version: str
    folder: str  # what the places of its items begin with
    supports: str  # the releases of megatron-core it takes, in words
    items: tuple[Item, ...]
    own: Mapping[str, tuple[str, ...]]  # subject -> places
    pin: str = ""  # the commit of megatron-core that it asks for, in words
    edits: tuple[Edit, ...] = ()  # what its maintainer changes, by file and line


def read_trainers(file: Path) -> tuple[Trainer, ...]:
    """The trainers in `file`. MatrixError, with the line, if it is not of the form."""
    read = Reader(str(file))
    top = read.mapping(compose(file, file.read_bytes()), "the file", {"trainers": True})
    return tuple(_trainer(read, name, node) for name, node in read.mapping(top["trainers"], "trainers").items())


def _trainer(read: Reader, name: str, node: yaml.Node) -> Trainer:
    keys = {"version": True, "folder": True, "supports": True, "items": True, "own": True}
    keys |= {"pin": False, "edits": True}
    found = read.mapping(node, name, keys)
    own = {
        subject: tuple(_place(read, place) for place in read.sequence(places, subject))
        for subject, places in read.mapping(found["own"], f"own of {name}").items()
    }
    return Trainer(
        name=name,
        version=read.quoted(found["version"], "version"),
        folder=read.text(found["folder"], "folder"),
        supports=read.text(found["supports"], "supports"),
        items=tuple(_item(read, item) for item in read.sequence(found["items"], f"items of {name}")),
        own=own,
        pin=read.text(found["pin"], "pin") if "pin" in found else "",
        edits=tuple(_edit(read, edit) for edit in read.sequence(found["edits"], f"edits of {name}")),
    )


ITEM_KEYS = {"at": True, "name": True, "does": True, "verdict": True, "releases": False, "patches": False}
ITEM_KEYS |= {"instead": False, "order": False, "note": False, "seen": False}
# What a verdict must say besides. One of the names in each group.
NEEDED = {
    "unnecessary": (("patches", "instead"), ("releases", "instead")),
    "composes": (("order",),),
    "conflicts": (("patches",), ("releases",), ("note",)),
}


def _item(read: Reader, node: yaml.Node) -> Item:
    found = read.mapping(node, "an item", ITEM_KEYS)
    verdict = read.text(found["verdict"], "verdict", [name for name in VERDICTS if name != "own"])
    for names in NEEDED[verdict]:
        if not any(name in found for name in names):
            raise read.fail(node, f"an item that is {verdict!r} lacks {' or '.join(map(repr, names))}")

    def text(key: str, choices: tuple[str, ...] = ()) -> str:
        return read.text(found[key], key, choices) if key in found else ""

    def texts(key: str) -> tuple[str, ...]:
        return read.texts(found[key], key) if key in found else ()

    ranges = read.mapping(found["releases"], "releases") if "releases" in found else {}
    return Item(
        at=_place(read, found["at"]),
        name=text("name"),
        does=text("does"),
        verdict=verdict,
        releases={name: read.range(value, f"the range of {name}") for name, value in ranges.items()},
        patches=texts("patches"),
        instead=text("instead"),
        order=text("order", ORDERS),
        note=text("note"),
        seen=texts("seen"),
    )


def _edit(read: Reader, node: yaml.Node) -> Edit:
    found = read.mapping(node, "an edit", {"at": True, "add": False})
    file, _, lines = _place(read, found["at"]).rpartition(":")
    first, _, last = lines.partition("-")
    add = read.text(found["add"], "add") if "add" in found else ""
    return Edit(file=file, first=int(first), last=int(last or (0 if add else first)), add=add)


def edited(text: str, edits: Iterable[Edit]) -> str:
    """The text of a file after `edits`, which are all of this file. ValueError if a line is not there."""
    lines = text.splitlines(keepends=True)
    for edit in sorted(edits, key=lambda edit: edit.first, reverse=True):
        if max(edit.first, edit.last) > len(lines):
            raise ValueError(f"{edit.file} has no line {max(edit.first, edit.last)}")
        lines[edit.first - 1 : edit.last or edit.first - 1] = edit.add.splitlines(keepends=True)
    return "".join(lines)


def _place(read: Reader, node: yaml.Node) -> str:
    place = read.text(node, "a place")
    file, _, lines = place.rpartition(":")
    first, _, last = lines.partition("-")
    if not file or not first.isdecimal() or (last and not (last.isdecimal() and int(first) < int(last))):
        raise read.fail(node, f"{place!r} is not file:line or file:from-to")
    return place


def problems(trainers: tuple[Trainer, ...], matrix: Matrix) -> Iterator[str]:
    """What the data says against the matrix: unknown patches, and releases in which a patch does nothing."""
    for trainer in trainers:
        for item in trainer.items:
            where = f"{trainer.name}, {item.at}"
            yield from (f"{where}: no patch is called {id!r}" for id in item.patches if id not in matrix.patches)
            for distribution in item.releases:
                if distribution not in matrix.supported:
                    yield f"{where}: no distribution is called {distribution!r}"
            if item.verdict == "unnecessary" and not item.instead:
                yield from (f"{where}: {said}" for said in _uncovered(item, matrix))


def _uncovered(item: Item, matrix: Matrix) -> Iterator[str]:
    """Releases in which none of the patches that stand for the item is bound."""
    patches = [matrix.patches[id] for id in item.patches if id in matrix.patches]
    for distribution in dict.fromkeys(patch.distribution for patch in patches):
        inside = _inside(item.releases.get(distribution, ""), matrix.supported[distribution])
        if not inside:
            yield f"it names no supported release of {distribution}"
        for release in inside:
            rules = [patch.pinned_rule(Version(release)) for patch in patches if patch.distribution == distribution]
            if not any(rule is not None and rule.variant for rule in rules):
                yield f"{', '.join(item.patches)} changes nothing in {distribution} {release}"


def _inside(range: str, releases: tuple[str, ...]) -> list[str]:
    if not range:
        return []
    specifiers = parse_range(range)
    return [release for release in releases if specifiers.contains(release, prereleases=True)]


HEAD = """\
# Trainers

Generated by `make docs` from docs/trainers.yaml.

Trainers patch megatron-core themselves. This page lists, for each of them, every place that assigns to megatron-core or
Transformer Engine, asks for a version or a signature, guards an import or carries a copy of one of their functions, as
far as shim has to do with it. [where-to-call.md](where-to-call.md) says where `shim.apply()` goes and has the diffs.

| verdict | meaning |
|---|---|
"""

HOW = """
The releases are those on which the trainer's lines have a use. A row with a test was run. A row without one was only
read.

The diffs name the lines that go and do not quote them. They need shim in every process that trains.
"""


RAN = """
## What was run

Generated from docs/trainers_run.yaml. On a CPU, with stand-ins for kernels and for packages that are not called. Models
are tiny: Qwen2, Qwen3-MoE and DeepSeek in form, with random weights. Numbers are relative differences from sequences
alone or from fp64, if nothing else is said.
"""


def trainers_page(file: Path, matrix: Matrix, ran: Iterable[str] = ()) -> str:
    """The text of docs/trainers.md. MatrixError if `file` contradicts the matrix. ran: the lines of a table."""
    trainers = read_trainers(file)
    wrong = list(problems(trainers, matrix))
    if wrong:
        raise MatrixError(f"{file}: " + "; ".join(wrong))
    beside = file.parent / PINS
    pins = json.loads(beside.read_text("utf-8")) if beside.exists() else {}
    lines = [*HEAD.splitlines(), *(f"| {verdict} | {meaning} |" for verdict, meaning in VERDICTS.items())]
    lines += [*HOW.splitlines(), "", "## All of them", "", *_summary(trainers), *RAN.splitlines(), "", *ran]
    for trainer in trainers:
        lines += ["", f"## {trainer.name}", "", f"Read at {trainer.version}. It takes {trainer.supports}."]
        if trainer.pin:
            lines += [f"Its pin is {trainer.pin}. {_at_its_pin(trainer, pins.get(trainer.name), matrix)}"]
        lines += [f"Places are below `{trainer.folder}`.", ""]
        lines += ["| place | what it does | releases | verdict |", "|---|---|---|---|"]
        order = list(VERDICTS)
        for item in sorted(trainer.items, key=lambda item: order.index(item.verdict)):
            cells = (f"`{item.at}` {item.name}", item.does, _releases(item, matrix), _verdict(item))
            lines.append("| " + " | ".join(cells) + " |")
        lines += ["", "What its maintainers can change:", "", *_diff(trainer)]
        lines += ["", f"Its own, {sum(map(len, trainer.own.values()))} places:", ""]
        lines += [f"- {subject}: {_places(places)}." for subject, places in trainer.own.items()]
    return "\n".join(lines) + "\n"


def _summary(trainers: tuple[Trainer, ...]) -> Iterator[str]:
    yield "| trainer | read at | places | " + " | ".join(VERDICTS) + " |"
    yield "|---" * (len(VERDICTS) + 3) + "|"
    totals = [0] * len(VERDICTS)
    for trainer in trainers:
        counts = [sum(item.verdict == verdict for item in trainer.items) for verdict in VERDICTS]
        counts[-1] = sum(map(len, trainer.own.values()))
        totals = [total + count for total, count in zip(totals, counts)]
        link = f"[{trainer.name}](#{trainer.name.lower()})"
        yield f"| {link} | {trainer.version} | {sum(counts)} | " + " | ".join(map(str, counts)) + " |"
    yield f"| all | | {sum(totals)} | " + " | ".join(map(str, totals)) + " |"


def _releases(item: Item, matrix: Matrix) -> str:
    spans = []
    for distribution, range in item.releases.items():
        found = _inside(range, matrix.supported[distribution])
        span = found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}" if found else range
        spans.append(span if distribution == "megatron-core" else f"Transformer Engine {span}")
    return "; ".join(spans) or "all"


def _verdict(item: Item) -> str:
    by = f"`{item.instead}`" if item.instead else _links(item.patches)
    if item.verdict == "unnecessary":
        said = f"**unnecessary**: {by}"
    elif item.verdict == "composes":
        said = f"**composes**, {item.order}" + (f", with {by}" if by else "")
    else:
        said = f"**conflicts** with {by}"
    said += "."
    said += f" {item.note}" if item.note else ""
    return said + "".join(f" Test: `{test.rpartition('/')[2]}`." for test in item.seen)


def _diff(trainer: Trainer) -> Iterator[str]:
    """The edits as a diff without the lines that go, which are the trainer's. Line numbers name them."""
    yield "```diff"
    for file in dict.fromkeys(edit.file for edit in trainer.edits):
        path = f"{trainer.folder}{file}".removeprefix("./")
        yield from (f"--- a/{path}", f"+++ b/{path}")
        moved = 0
        for edit in sorted((edit for edit in trainer.edits if edit.file == file), key=lambda edit: edit.first):
            gone = edit.last - edit.first + 1 if edit.last else 0
            added = edit.add.splitlines()
            # As a diff without context counts: if nothing goes or comes, the line before.
            old, new = edit.first - (not gone), edit.first + moved - (not added)
            yield f"@@ -{old},{gone} +{new},{len(added)} @@"
            if gone:
                yield f"- (line {edit.first})" if gone == 1 else f"- (lines {edit.first} to {edit.last})"
            yield from (f"+{line}" for line in added)
            moved += len(added) - gone
    yield "```"


def _at_its_pin(trainer: Trainer, record: Mapping[str, Any] | None, matrix: Matrix) -> str:
    """The result of an audit of the pinned sources. MatrixError if it was of another pin."""
    if record is None:
        return "Nobody has audited it."
    if record["pin"] != trainer.pin:
        raise MatrixError(
            f"{PINS} has {trainer.name} at {record['pin']!r}: run python -m shim.maintenance.trainer_pins"
        )
    found = {verdict: tuple(id for id in ids if id in matrix.patches) for verdict, ids in record["verdicts"].items()}
    counts = [f"{len(ids)} {AUDITED.get(verdict, verdict)}" for verdict, ids in found.items() if verdict != "drifted"]
    drifted = found.get("drifted", ())
    counts.append(f"{len(drifted) or 'none'} {AUDITED['drifted']}" + (f": {_links(drifted)}" if drifted else ""))
    return f"`shim audit` of these sources says of {sum(map(len, found.values()))} patches: {', '.join(counts)}."


def _links(ids: tuple[str, ...]) -> str:
    return ", ".join(f"[{id}](patches/{id}.md)" for id in ids)


def _places(places: tuple[str, ...]) -> str:
    """Places by file: `a.py` 3, 7-9; `b.py` 4."""
    by_file: dict[str, list[str]] = {}
    for place in places:
        file, _, lines = place.rpartition(":")
        by_file.setdefault(file, []).append(lines)
    return "; ".join(f"`{file}` {', '.join(lines)}" for file, lines in by_file.items())
