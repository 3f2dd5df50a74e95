"""Files of known releases, by a digest of what they hold: the bodies in them are known without parsing.

known_files.json is written by `shim pin --releases`: {module: {digest of a file: {qualified name: fingerprint}}}, for
all names that a patch of the matrix binds or relies on. A digest is that of the whole file, so that nothing in it can
be stale: another file is another digest, and is parsed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from shim._errors import SourceError
from shim._releases.fingerprint import ABSENT, fingerprint, split_target
from shim._releases.sources import Sources

__all__ = ["FILE", "KnownFiles", "known_files", "known_value", "measure_files", "render_files"]

FILE = Path(__file__).with_name("known_files.json")
MISSING = ""  # in the place of a fingerprint: neither the name nor what it would be in is there

KnownFiles = Mapping[str, Mapping[str, Mapping[str, str]]]


@lru_cache(maxsize=1)
def known_files() -> KnownFiles:
    """The table that ships with shim."""
    return json.loads(FILE.read_text("utf-8"))


def measure_files(sources: Sources, targets: Iterable[str], into: dict[str, dict[str, dict[str, str]]]) -> None:
    """Enter what `sources`, a release, has of the files and bodies of `targets` into a table."""
    for target in targets:
        module, qualname = split_target(target)
        digest = sources.digest(module)
        if digest is not None:
            bodies = into.setdefault(module, {}).setdefault(digest, {})
            bodies[qualname] = _value(sources, target)


def _value(sources: Sources, target: str) -> str:
    """The fingerprint; ABSENT where only the name is missing; MISSING where what it would be in is missing as well."""
    try:
        return fingerprint(sources, target, added=True)
    except SourceError:
        return MISSING


def known_value(digest: str, module: str, qualname: str, added: bool) -> str | None:
    """The fingerprint of a name in a file by its digest; None where it is not in the table. SourceError where the name
    is missing, as fingerprint() has it."""
    value = known_files().get(module, {}).get(digest, {}).get(qualname)
    if value == MISSING or (value == ABSENT and not added):
        raise SourceError(f"{module} has no {qualname}", "missing")
    return value


def render_files(table: KnownFiles) -> str:
    """The text of the table: a line for each file, so that a change shows which ones a release has brought."""
    modules = []
    for module, digests in sorted(table.items()):
        lines = (f'  "{digest}": {json.dumps(bodies, sort_keys=True)}' for digest, bodies in sorted(digests.items()))
        modules.append(f'"{module}": {{\n' + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(modules) + "\n}\n"
