"""Pins: measure variants and fingerprints on real releases, and write them beside the matrix."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from packaging.version import Version

from shim._errors import MatrixError, SourceError
from shim._matrix.model import Matrix, PatchEntry, Pin
from shim._matrix.pins import lock_path
from shim._releases.fingerprint import fingerprint
from shim._releases.known_files import measure_files
from shim._releases.sources import Sources
from shim._releases.versions import parse_version

__all__ = ["measure", "stale", "write"]

INLINE = "# --- Below: written by `shim pin` from the wheels. Never by hand. ---"  # above the pins of shim 0.1
# The key `releases` with its content, and the marker above it if there is one.
PINS_INSIDE = re.compile(rf"^(?:{re.escape(INLINE)}\n+)?releases:.*\n?(?:(?:[ \t].*)?(?:\n|\Z))*", re.MULTILINE)


def _or_none(sources: Sources, target: str) -> str | None:
    try:
        return fingerprint(sources, target)
    except SourceError:
        return None


def _measure(entry: PatchEntry, distribution: str, release: str, sources: Sources) -> Pin | None:
    version = parse_version(release)
    rule = None if version is None else entry.pinned_rule(version)
    if rule is None:
        return None
    if rule.variant is None:
        found = {target: value for target in entry.bodies if (value := _or_none(sources, target))}
        return Pin(None, found) if found else None
    variant = entry.variants[rule.variant]
    try:
        return Pin(variant.name, {t: variant.fingerprint(sources, t) for t in variant.bodies})
    except SourceError as error:
        raise MatrixError(
            f"{entry.id}: the rules give variant {variant.name} to {distribution} {release}, but {error}. "
            "Remedy: correct the targets of the variant or the ranges in version_matrix.yaml."
        ) from None


def measure(
    matrix: Matrix,
    fetch: Callable[[str, str], Path],
    progress: Callable[[str, str], None] | None = None,
    files: dict[str, dict[str, dict[str, str]]] | None = None,
) -> dict[str, dict[str, dict[str, Pin]]]:
    """The pins of every patch on every supported release. `fetch(distribution, release)` gives its sources.

    files: a table to fill with the files and bodies of all releases, see shim._releases.known_files.
    """
    pins: dict[str, dict[str, dict[str, Pin]]] = {}
    bodies = sorted({body for entry in matrix.patches.values() for body in entry.bodies})
    for distribution, releases in matrix.supported.items():
        for release in releases:
            if progress is not None:
                progress(distribution, release)
            sources = Sources([fetch(distribution, release)])
            if files is not None:
                measure_files(sources, bodies, files)
            found = {
                id: pin
                for id, entry in matrix.patches.items()
                if entry.distribution == distribution and (pin := _measure(entry, distribution, release, sources))
            }
            pins.setdefault(distribution, {})[release] = found
    return pins


def stale(matrix: Matrix) -> list[str]:
    """Where pins disagree with rules and supported list. Does not compare bodies, as ``shim pin --check`` does."""
    found: list[str] = []
    for distribution, releases in matrix.supported.items():
        for release in releases:
            pins = matrix.pins.get(distribution, {}).get(release, {})
            for entry in matrix.patches.values():
                if entry.distribution != distribution:
                    continue
                rule = entry.pinned_rule(Version(release))
                pin = pins.get(entry.id)
                wanted = None if rule is None else rule.variant
                if wanted is not None and pin is None:
                    found.append(f"{distribution} {release} lacks a pin of {entry.id}, variant {wanted}")
                elif pin is not None and pin.variant != wanted:
                    found.append(f"{distribution} {release} pins {pin.variant} of {entry.id}; the rules say {wanted}")
    return found


def write(path: str | os.PathLike[str], text: str) -> bool:
    """Write `text` as the pins of the matrix at `path`. Returns whether a file has changed.

    Removes pins that shim 0.1 wrote into the matrix itself.
    """
    matrix = Path(path)
    rules = matrix.read_text("utf-8")
    without = PINS_INSIDE.sub("", rules)
    changed = _replace(lock_path(matrix), text)
    return (without != rules and _replace(matrix, without.rstrip("\n") + "\n")) or changed


def _replace(file: Path, text: str) -> bool:
    if file.exists() and file.read_text("utf-8") == text:
        return False
    scratch = file.with_name(file.name + ".new")
    scratch.write_text(text, "utf-8")
    os.replace(scratch, file)
    return True
