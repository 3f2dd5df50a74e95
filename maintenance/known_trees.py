"""Add what the proofs have shown on a commit or a fork to the evidence that ships with shim: for developers of shim.

    shim pin --prove --against TREE --lock FILE
    python -m shim.maintenance.known_trees NAME FILE [--note "slime's image: ..."]

NAME is that of a commit in the matrix, or any other for a fork. `make pins` takes the variants of commits from here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from shim._errors import OptionError
from shim._matrix.load import load_matrix
from shim._matrix.model import Matrix, PatchEntry
from shim._planning.evidence import CANNOT_RUN, NOT_FIXED, digest_of_bodies
from shim._planning.lock import read_lock
from shim._releases.known_files import (
    SHORT,
    TREES,
    KnownFiles,
    Packed,
    known_files,
    unpacked,
)

from .tables import packed, render_packed

__all__ = ["is_stale", "main", "render_trees", "with_files", "with_tree", "without_failures"]

Entries = Mapping[str, PatchEntry]

ABOUT = ("date", "torch", "python", "where")  # of a tree, beside its releases
SAID = ("verdict", "variant", "shown", "dropped")  # of bodies


def with_tree(
    found: Mapping[str, Any], name: str, about: Mapping[str, str], lock: Mapping[str, Any], entries: Entries
) -> dict[str, Any]:
    """The table with the tree of a lock: what its proofs have shown, beside what the table had of other patches.

    about: `of`, what the tree is; and of a commit of upstream's history `day`.
    A patch whose proofs showed nothing on the tree is not in it. OptionError if the lock has no proofs.
    """
    proved = lock.get("proved")
    if proved is None:
        raise OptionError("the lock has no proofs; write it with shim pin --prove --lock FILE")
    patches: dict[str, list[dict[str, Any]]] = {}
    for id, said in found["patches"].items():
        kept = [_without(each, name) for each in said] if id in proved["patches"] else [dict(each) for each in said]
        patches[id] = [each for each in kept if each["bodies"]]
    for id, judged in sorted(proved["patches"].items()):
        if judged["verdict"] != CANNOT_RUN:
            said = {
                **{key: judged[key] for key in SAID if key in judged},
                "names": names_of(entries[id], judged["variant"]),
            }
            bodies = digest_of_bodies(judged["fingerprints"])
            _add(patches.setdefault(id, []), {"dropped": [], **said}, bodies, name)
    keys = ABOUT[:1] if "day" in about else ABOUT  # there are many commits, and all are proved in the same way
    tree = {**about, "releases": lock["releases"], **{key: proved[key] for key in keys}}
    return {
        "trees": {**found["trees"], name: tree},
        "patches": {id: said for id, said in patches.items() if said},
        "files": with_files(found["files"], proved["files"]),
    }


def with_files(found: Packed, more: KnownFiles) -> dict[str, dict[str, Any]]:
    """The files of a table and more, without those of releases."""
    files: dict[str, dict[str, Mapping[str, str]]] = {}
    for module in {**found, **more}:
        of_releases = {digest[:SHORT] for digest in known_files().get(module, ())}
        new = {digest[:SHORT]: bodies for digest, bodies in more.get(module, {}).items()}
        digests: dict[str, Mapping[str, str]] = {**unpacked(found, module), **new}
        kept = {digest: bodies for digest, bodies in digests.items() if digest not in of_releases}
        files |= {module: kept} if kept else {}
    return packed(files)


def names_of(entry: PatchEntry, variant: str | None) -> str:
    """8 hexadecimal digits over the names whose bodies evidence is about. Evidence about other names is stale."""
    names = entry.bodies if variant is None else entry.variants[variant].bodies if variant in entry.variants else ()
    return hashlib.sha256(" ".join(sorted(names)).encode()).hexdigest()[:8]


def is_stale(entry: PatchEntry | None, said: Mapping[str, Any]) -> bool:
    """Whether evidence is about a patch or variant that is gone, or about other names than it binds and reads today."""
    return entry is None or names_of(entry, said["variant"]) != said["names"]


def without_failures(patches: Mapping[str, Sequence[dict[str, Any]]], commits: Collection[str]) -> dict[str, Any]:
    """What was shown of patches, without those that did not fix one of these commits: their code may do it today."""
    left: dict[str, list[dict[str, Any]]] = {}
    for id, shown in patches.items():
        kept = [_without(said, *commits) if said["verdict"] == NOT_FIXED else said for said in shown]
        left[id] = [said for said in kept if said["bodies"]]
    return {id: kept for id, kept in left.items() if kept}


def _without(said: Mapping[str, Any], *trees: str) -> dict[str, Any]:
    """What was shown, on other trees."""
    left = {digest: [name for name in names.split() if name not in trees] for digest, names in said["bodies"].items()}
    return {**said, "bodies": {digest: " ".join(names) for digest, names in left.items() if names}}


def _add(entries: list[dict[str, Any]], said: Mapping[str, Any], bodies: str, name: str) -> None:
    """Name the tree beside others with the same verdict about the same bodies, or make an entry."""
    same = ("verdict", "variant", "dropped", "names")
    alike = [entry for entry in entries if all(entry[key] == said[key] for key in same)]
    there = [entry for entry in alike if bodies in entry["bodies"]]
    if there:
        there[0]["bodies"][bodies] += f" {name}"
        return
    for entry in alike:
        if entry["shown"] == said["shown"]:
            entry["bodies"][bodies] = name
            return
    entries.append({**said, "bodies": {bodies: name}})


def render_trees(found: Mapping[str, Any]) -> str:
    """The text of the table, with one line for each tree, for what was shown of a patch, and for each file."""
    trees = [f"  {json.dumps(name)}: {json.dumps(said)}" for name, said in sorted(found["trees"].items())]
    patches = []
    for id, entries in sorted(found["patches"].items()):
        lines = ",\n".join(f"   {json.dumps(said)}" for said in entries)
        patches.append(f"  {json.dumps(id)}: [\n{lines}\n  ]")
    parts = {"trees": trees, "patches": patches}
    text = "".join(f' "{key}": {{\n' + ",\n".join(lines) + "\n },\n" for key, lines in parts.items())
    return f'{{\n{text} "files": {render_packed(found["files"])}\n}}\n'


def main(argv: Sequence[str] | None = None) -> int:
    """Write known_trees.json with one tree more."""
    parser = argparse.ArgumentParser(prog="python -m shim.maintenance.known_trees", description=__doc__)
    parser.add_argument("name", help="of the tree")
    parser.add_argument("lock", type=Path, help="written by shim pin --prove on the tree")
    parser.add_argument("--note", dest="of", help="what the tree is, in words; of a commit the matrix says it")
    options = parser.parse_args(argv)
    found = json.loads(TREES.read_text("utf-8"))
    matrix = load_matrix()
    of = options.of or _said_of(matrix, found, options.name)
    table = with_tree(found, options.name, {"of": of}, read_lock(options.lock), matrix.patches)
    TREES.write_text(render_trees(table), "utf-8")
    trees = [names for said in table["patches"].values() for each in said for names in each["bodies"].values()]
    shown = sum(options.name in names.split() for names in trees)
    print(f"{options.name}: {shown} patches")
    return 0


def _said_of(matrix: Matrix, found: Mapping[str, Any], name: str) -> str:
    for commits in matrix.commits.values():
        if name in commits:
            return commits[name].of
    if name in found["trees"]:
        return str(found["trees"][name]["of"])
    raise OptionError(f"{name} is no commit of the matrix; say with --note what it is")


if __name__ == "__main__":
    sys.exit(main())
