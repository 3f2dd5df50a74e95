"""Files of known releases by digest, so that shim knows their bodies without parsing; and commits and forks.

`shim pin --releases` writes known_files.json: {module: {digest of a file: {qualified name: fingerprint}}}, for all
names that a patch of the matrix binds or reads. The digest covers the whole file, so no entry can be stale. Files of
commits and forks are in known_trees.json. A file with an unknown digest is parsed.

known_trees.json is about commits and forks: what the proofs of patches have shown there, and the bodies in their files.
It is made of locks that `shim pin --prove` has written, and by `make history` (docs/evidence.md):

    trees: {name: {of, releases, date, torch, python, where}}, and of a commit of upstream's history its `day`
    patches: {patch id: [{verdict, variant, shown, dropped, names, bodies}]}. `bodies` has the digest of each set of
        bodies with the trees that have it, `names` is a digest of the names that are bound or read
    files: the bodies in files that no release has, see `unpacked`
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
    "unpacked",
]

FILE = Path(__file__).with_name("known_files.json")
TREES = Path(__file__).with_name("known_trees.json")
SHORT = 16  # digits of a digest in a packed table
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
    released = known_files().get(module, {}).get(digest)
    bodies = _files_of_trees(module).get(digest[:SHORT], {}) if released is None else released
    return _seen(bodies.get(qualname), module, qualname, added)


def known_with(files: KnownFiles) -> Known:
    """`known_value`, with a second table for the files that the first does not have."""
    if not files:
        return known_value

    def known(digest: str, module: str, qualname: str, added: bool) -> str | None:
        value = known_value(digest, module, qualname, added)
        if value is not None:
            return value
        return _seen(files.get(module, {}).get(digest, {}).get(qualname), module, qualname, added)

    return known


def _seen(value: str | None, module: str, qualname: str, added: bool) -> str | None:
    if value == MISSING or (value == ABSENT and not added):
        raise SourceError(f"{module} has no {qualname}", "missing")
    return value


Packed = Mapping[str, Mapping[str, Any]]


def unpacked(table: Packed, module: str) -> dict[str, dict[str, str]]:
    """The files of a module in a packed table, with their bodies.

    The table has a third of its size: by module the names, the bodies of each, and the files that have the same. A file
    is a row: for each name which of its bodies it has, "-" if that is not known. Digests have 16 digits.
    """
    if module not in table:
        return {}
    names, values = table[module]["names"], table[module]["bodies"]
    found: dict[str, dict[str, str]] = {}
    for row, digests in table[module]["files"].items():
        having = ((name, of, place) for name, of, place in zip(names, values, row.split(), strict=True))
        bodies = {name: of[int(place)] for name, of, place in having if place != "-"}
        found.update(dict.fromkeys(digests.split(), bodies))
    return found


@lru_cache
def _files_of_trees(module: str) -> dict[str, dict[str, str]]:
    return unpacked(known_trees()["files"], module)
