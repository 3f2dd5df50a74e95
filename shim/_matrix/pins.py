"""The pins beside a matrix: version_matrix.lock.json, written by `shim pin --releases` and never by hand.

Its form is patch -> variant (or "upstream") -> target -> body -> releases. So the diff of a new release shows which
bodies it changed and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from shim._errors import MatrixError
from shim._matrix.model import UPSTREAM, PatchEntry, Pinned
from shim._releases.files import read_json
from shim._releases.fingerprint import ABSENT

__all__ = ["FINGERPRINT", "read_pins"]

FINGERPRINT = r"[0-9a-f]{16}\.([0-9a-f]{8}|-)|" + ABSENT


def read_pins(
    file: Path, content: bytes, patches: Mapping[str, PatchEntry], names: Mapping[str, tuple[str, ...]]
) -> dict[str, dict[str, Pinned]]:
    """Read and check the pins in `content`, the content of `file`. MatrixError names what does not fit the rules.

    names: the supported releases and the commits of each distribution.
    """
    found = _parsed(file, content)
    for id, variants in _mapping(file, found, "the file").items():
        if id not in patches:
            _fail(file, f"there is no patch {id!r}")
        releases = names.get(patches[id].distribution, ())
        for name, targets in _mapping(file, variants, id).items():
            _check_variant(file, patches[id], name, _mapping(file, targets, f"{id} {name}"), releases)
    return found


def _parsed(file: Path, content: bytes) -> Any:
    try:
        return read_json(content)
    except ValueError as error:
        raise MatrixError(f"{file}:1: cannot be read as JSON: {error}; run shim pin") from None


def _check_variant(
    file: Path, entry: PatchEntry, name: str, targets: Mapping[str, Any], releases: tuple[str, ...]
) -> None:
    if name != UPSTREAM and name not in entry.variants:
        _fail(file, f"there is no variant {name!r} of {entry.id}", f"shim pin --patch {entry.id}")
    having: dict[str, set[str]] = {}
    for target, bodies in targets.items():
        what = f"{entry.id} {name} {target}"
        for body, given in _mapping(file, bodies, what).items():
            if not re.fullmatch(FINGERPRINT, body):
                _fail(file, f"{what}: {body!r} is not a fingerprint")
            if not isinstance(given, list) or not given or not all(isinstance(release, str) for release in given):
                _fail(file, f"{what}: {body} must have a list of releases")
            for release in given:
                if release not in releases:
                    _fail(
                        file,
                        f"{what}: {entry.distribution} {release} is pinned but not in the supported list, nor a commit",
                    )
                if release in having.setdefault(target, set()):
                    _fail(file, f"{what}: {release} has two bodies")
                having[target].add(release)
    if name == UPSTREAM:
        odd = sorted(having.keys() - set(entry.bodies))
        if odd:
            _fail(file, f"{odd[0]} is pinned, but is no body of {entry.id}")
        return
    pinned = set().union(*having.values())
    for target in sorted({*having, *entry.variants[name].bodies}):
        if target not in entry.variants[name].bodies or having.get(target) != pinned:
            what = f"{target} is pinned or a body of variant {name} of {entry.id}, but not both on every release"
            _fail(file, what, f"shim pin --patch {entry.id}")


def _mapping(file: Path, value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        _fail(file, f"{what} must be a mapping")
    return value


def _fail(file: Path, message: str, remedy: str = "shim pin --releases") -> NoReturn:
    raise MatrixError(f"{file}:1: {message}; run {remedy}")
