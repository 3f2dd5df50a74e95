"""Add what the proofs have shown on a commit or a fork to the evidence that ships with shim: for developers of shim.

    shim pin --prove --against TREE --lock FILE
    python -m shim.maintenance.known_trees NAME FILE [--note "slime's image: ..."]

NAME is that of a commit in the matrix, or any other for a fork. `make pins` takes the variants of commits from here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shim._errors import OptionError
from shim._matrix.load import load_matrix
from shim._matrix.model import Matrix
from shim._planning.evidence import CANNOT_RUN
from shim._planning.lock import read_lock
from shim._releases.known_files import TREES, known_files, render_files

__all__ = ["main", "render_trees", "with_tree"]

ABOUT = ("date", "torch", "python", "where")  # of a tree, beside its releases
SAID = ("verdict", "variant", "fingerprints", "shown")  # of a patch


def with_tree(found: Mapping[str, Any], name: str, of: str, lock: Mapping[str, Any]) -> dict[str, Any]:
    """The table with the tree of a lock: what its proofs have shown, in place of what the table had of these patches.

    A patch whose proofs showed nothing on the tree is not in it. OptionError if the lock has no proofs.
    """
    proved = lock.get("proved")
    if proved is None:
        raise OptionError("the lock has no proofs; write it with shim pin --prove --lock FILE")
    about = {"of": of, "releases": lock["releases"], **{key: proved[key] for key in ABOUT}}
    trees = {**{other: said for other, said in found["trees"].items() if other != name}, name: about}
    patches: dict[str, list[dict[str, Any]]] = {}
    for id, said in _entries(found, name, proved["patches"]):
        patches.setdefault(id, []).append(said)
    for id, judged in sorted(proved["patches"].items()):
        if judged["verdict"] != CANNOT_RUN:
            said = {key: judged[key] for key in SAID}
            _add(patches.setdefault(id, []), name, {**said, "dropped": judged.get("dropped", [])})
    known = known_files()
    files: dict[str, dict[str, Any]] = {}
    for module in {**found["files"], **proved["files"]}:
        digests = {**found["files"].get(module, {}), **proved["files"].get(module, {})}
        new = {digest: bodies for digest, bodies in digests.items() if digest not in known.get(module, ())}
        files |= {module: new} if new else {}
    return {"trees": trees, "patches": patches, "files": files}


def _entries(found: Mapping[str, Any], name: str, judged: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The entries with the ids of their patches, without the tree `name` in those of the patches `judged`."""
    for id, entries in found["patches"].items():
        for said in entries:
            trees = [tree for tree in said["trees"] if tree != name or id not in judged]
            if trees:
                yield id, {**said, "trees": trees}


def _add(entries: list[dict[str, Any]], name: str, said: Mapping[str, Any]) -> None:
    """Name the tree in the entry of the same verdict about the same bodies, or make one."""
    same = ("verdict", "variant", "fingerprints", "dropped")
    for entry in entries:
        if all(entry[key] == said[key] for key in same):
            entry["trees"].append(name)
            return
    entries.append({"trees": [name], **said})


def render_trees(found: Mapping[str, Any]) -> str:
    """The text of the table, with one line for each tree, for what was shown of a patch, and for each file."""
    trees = [f"  {json.dumps(name)}: {json.dumps(said)}" for name, said in sorted(found["trees"].items())]
    patches = []
    for id, entries in sorted(found["patches"].items()):
        lines = ",\n".join(f"   {json.dumps(said)}" for said in entries)
        patches.append(f"  {json.dumps(id)}: [\n{lines}\n  ]")
    parts = {"trees": trees, "patches": patches}
    text = "".join(f' "{key}": {{\n' + ",\n".join(lines) + "\n },\n" for key, lines in parts.items())
    return f'{{\n{text} "files": {render_files(found["files"]).strip()}\n}}\n'


def main(argv: Sequence[str] | None = None) -> int:
    """Write known_trees.json with one tree more."""
    parser = argparse.ArgumentParser(prog="python -m shim.maintenance.known_trees", description=__doc__)
    parser.add_argument("name", help="of the tree")
    parser.add_argument("lock", type=Path, help="written by shim pin --prove on the tree")
    parser.add_argument("--note", dest="of", help="what the tree is, in words; of a commit the matrix says it")
    options = parser.parse_args(argv)
    found = json.loads(TREES.read_text("utf-8"))
    of = options.of or _said_of(load_matrix(), found, options.name)
    table = with_tree(found, options.name, of, read_lock(options.lock))
    TREES.write_text(render_trees(table), "utf-8")
    shown = sum(options.name in said["trees"] for entries in table["patches"].values() for said in entries)
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
