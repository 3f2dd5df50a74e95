"""The matrix in a form that loads fast: matrix.json, the rules as plain data with a digest of their sources.

Reading YAML takes longer than everything else in a plan. The file is made with the wheel, and by `make env` in a
checkout; it is never checked in. shim ignores it, and reads the YAML, if the digest is not that of version_matrix.yaml,
the patch.yaml of each patch and the pins, or if the file is not what was written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shim._matrix.declared import Commit, Declared
from shim._matrix.model import (
    UPSTREAM,
    Decided,
    Matrix,
    PatchEntry,
    Rule,
    Variant,
)
from shim._record import computed_once

__all__ = ["FILE", "read_compiled", "render_compiled"]

FILE = Path(__file__).with_name("matrix.json")
FORMAT = 18  # raise it with every change of the file's form or of the records in it


def render_compiled(matrix: Matrix, digest: str, described: str, lock: bytes) -> str:
    """The text of the file, for a matrix that was read and checked with the pins in `lock`.

    digest: that of its rules and pins.    described: that of the descriptions of its patches.
    """
    bodies = {
        id: {
            variant: {target: " ".join(bodies) for target, bodies in targets.items()}
            for variant, targets in variants.items()
            if variant != UPSTREAM
        }
        for id, variants in matrix.pinned.items()
    }
    plain = {
        "supported": matrix.supported,
        "commits": matrix.commits,
        "patches": matrix.patches,
        "bodies": bodies,
        "pins": _places(lock),
    }
    body = json.dumps(plain, default=_plain, separators=(",", ":"))
    head = {
        "format": FORMAT,
        "digest": digest,
        "described": described,
        "body": hashlib.sha256(body.encode()).hexdigest(),
    }
    return f"{json.dumps(head)}\n{body}\n"


def _places(lock: bytes) -> dict[str, tuple[int, int]]:
    """Where the value of each key of a JSON object begins and ends, so that one can be parsed without the others."""
    decoder, text, found = json.JSONDecoder(), lock.decode("ascii"), {}
    at = text.index("{") + 1
    while text[at:].lstrip(" \n,")[0] != "}":
        key, at = decoder.raw_decode(text, text.index('"', at))
        start = text.index("{", at)
        _, at = decoder.raw_decode(text, start)
        found[key] = start, at
    return found


def _plain(value: Any) -> Any:
    """Types that JSON does not know: a set becomes a sorted list, and a record a mapping."""
    return sorted(value) if isinstance(value, frozenset) else vars(value)


def read_compiled(file: Path, digest: str, described: str | None, lock: bytes) -> Matrix | None:
    """The matrix at `file` with the pins in `lock`. None if FILE was made from others.

    described: the digest of the descriptions of its patches; None if they are known to be those of FILE.
    """
    try:
        head, _, body = FILE.read_bytes().partition(b"\n")
        said = json.loads(head)
        made_from = said.pop("described", None)
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    body = body.rstrip(b"\n")
    if said != {"format": FORMAT, "digest": digest, "body": hashlib.sha256(body).hexdigest()}:
        return None
    if described not in (None, made_from):
        return None
    found = json.loads(body)
    supported = {name: tuple(releases) for name, releases in found["supported"].items()}
    patches = {id: _patch(entry) for id, entry in found["patches"].items()}
    commits = {
        distribution: {name: Commit(**given) for name, given in commits.items()}
        for distribution, commits in found["commits"].items()
    }
    pinned = {id: _Parsed(lock[start:end]) for id, (start, end) in found["pins"].items()}
    return Matrix(str(file), patches, supported, pinned, bodies=found["bodies"], commits=commits)


class _Parsed(Mapping[str, Any]):
    """The values of a JSON object, parsed on first use. A plan on a known release uses few pins."""

    def __init__(self, text: bytes) -> None:
        self._text = text

    @computed_once
    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._text)
        return found

    def __getitem__(self, key: str) -> Any:
        return self._read[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, _Parsed) else self._read == other

    __hash__ = None  # type: ignore[assignment]


# The file has every field of a record. Values that JSON made a list or a text get their type back.


def _patch(entry: dict[str, Any]) -> PatchEntry:
    entry["variants"] = {name: _variant(given) for name, given in entry["variants"].items()}
    entry["rules"] = tuple(Rule(**given) for given in entry["rules"])
    entry["pairs"] = tuple(Rule(**given) for given in entry["pairs"])
    entry["concerns"] = tuple(map(tuple, entry["concerns"]))
    entry["references"] = tuple(entry["references"])
    entry["met_by"] = tuple(entry["met_by"])
    entry["probe"] = tuple(entry["probe"])
    entry["declared"] = {name: _declared(given) for name, given in entry["declared"].items()}
    entry["before"] = tuple(entry["before"])
    entry["decided"] = tuple(Decided(**given) for given in entry["decided"])
    return PatchEntry(**entry)


def _variant(given: dict[str, Any]) -> Variant:
    for name in ("targets", "depends_on"):
        given[name] = tuple(given[name])
    for name in ("optional", "may_be_missing", "no_aliases", "wraps_any"):
        given[name] = frozenset(given[name])
    given["reached_by"] = {target: tuple(methods) for target, methods in given["reached_by"].items()}
    return Variant(**given)


def _declared(given: dict[str, Any]) -> Declared:
    given["choices"] = tuple(given["choices"])
    return Declared(**given)
