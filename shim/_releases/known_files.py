"""Files of known releases by digest, so that shim knows their bodies without parsing; and commits and forks.

`shim pin --releases` writes known_files.json: {module: {digest of a file: {qualified name: fingerprint}}}, for all
names that a patch of the matrix binds or reads. The digest covers the whole file, so no entry can be stale. Files of
commits and forks are in known_trees.json. A file with an unknown digest is parsed.

known_trees.json is about commits and forks that trainers run: what the proofs of patches have shown there, and the
bodies in their files. It is made of locks that `shim pin --prove` has written (docs/evidence.md):

    trees: {name: {of, releases, date, torch, python, where}}
    patches: {patch id: [{trees, verdict, variant, fingerprints, shown, dropped}]}, trees with the same bodies together
    files: as in known_files.json, for files that no release has
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from shim._errors import SourceError
from shim._releases.fingerprint import ABSENT, fingerprint, split_target
from shim._releases.sources import Known, Sources

__all__ = [
    "FILE",
    "MISSING",
    "TREES",
    "KnownFiles",
    "known_files",
    "known_trees",
    "known_value",
    "known_with",
    "measure_files",
    "render_files",
]

FILE = Path(__file__).with_name("known_files.json")
TREES = Path(__file__).with_name("known_trees.json")
MISSING = ""  # stands for a fingerprint: the name is missing, and so is its class or module

KnownFiles = Mapping[str, Mapping[str, Mapping[str, str]]]


@lru_cache(maxsize=1)
def known_files() -> KnownFiles:
    """The table that ships with shim."""
    return json.loads(FILE.read_text("utf-8"))


@lru_cache(maxsize=1)
def known_trees() -> Mapping[str, Any]:
    """The table that ships with shim. It is read on first use: a plan on a release does not need it."""
    return json.loads(TREES.read_text("utf-8"))


def measure_files(sources: Sources, targets: Iterable[str], into: dict[str, dict[str, dict[str, str]]]) -> None:
    """Enter the files and bodies of `targets` in the release `sources` into a table."""
    for target in targets:
        module, qualname = split_target(target)
        digest = sources.digest(module)
        if digest is not None:
            bodies = into.setdefault(module, {}).setdefault(digest, {})
            bodies[qualname] = _value(sources, target)


def _value(sources: Sources, target: str) -> str:
    """The fingerprint. ABSENT if only the name is missing, MISSING if its class or module is also missing."""
    try:
        return fingerprint(sources, target, may_be_missing=True)
    except SourceError:
        return MISSING


def known_value(digest: str, module: str, qualname: str, added: bool) -> str | None:
    """The fingerprint of a name in the file with this digest. None if the table does not have it.

    Raises SourceError if the name is missing from the file, as fingerprint() does.
    """
    table = known_files()
    if digest not in table.get(module, ()):
        table = known_trees()["files"]
    return _value_in(table, digest, module, qualname, added)


def known_with(files: KnownFiles) -> Known:
    """`known_value`, with a second table for the files that the first does not have."""
    if not files:
        return known_value

    def known(digest: str, module: str, qualname: str, added: bool) -> str | None:
        value = known_value(digest, module, qualname, added)
        return _value_in(files, digest, module, qualname, added) if value is None else value

    return known


def _value_in(table: KnownFiles, digest: str, module: str, qualname: str, added: bool) -> str | None:
    value = table.get(module, {}).get(digest, {}).get(qualname)
    if value == MISSING or (value == ABSENT and not added):
        raise SourceError(f"{module} has no {qualname}", "missing")
    return value


def render_files(table: KnownFiles) -> str:
    """The text of the table, with one line for each file, so that a diff shows the files of a new release."""
    modules = []
    for module, digests in sorted(table.items()):
        lines = (f'  "{digest}": {json.dumps(bodies, sort_keys=True)}' for digest, bodies in sorted(digests.items()))
        modules.append(f'"{module}": {{\n' + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(modules) + "\n}\n"
