"""Pins: measure variants and fingerprints on real releases, and write them into version_matrix.yaml."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from packaging.version import Version

from shim._errors import MatrixError, SourceError
from shim._matrix.model import Matrix, PatchEntry, Pin
from shim._releases.detect import Environment, Installed
from shim._releases.fingerprint import fingerprint
from shim._releases.known_files import measure_files
from shim._releases.sources import Sources
from shim._releases.versions import parse_version

__all__ = ["MARKER", "measure", "release_environment", "render", "stale", "write"]

MARKER = "# --- Below: written by `shim pin` from the wheels. Never by hand. ---"


def release_environment(distribution: str, package: str, release: str, root: str | os.PathLike[str]) -> Environment:
    """An environment that holds just this release, unpacked below `root`; nothing of it is imported."""
    installed = Installed(distribution, package, str(root), release, "unpacked wheel")
    return Environment({distribution: installed}, Sources([root]))


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
    """Fingerprints of every patch on every supported release; `fetch(distribution, release)` gives its sources.

    `files`: a table to enter the files and bodies of all releases into, see shim._releases.known_files.
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
    """What the pins lack or have too much beside rules and supported list; bodies are compared by ``shim pin``."""
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


def render(pins: Mapping[str, Mapping[str, Mapping[str, Pin]]]) -> str:
    """The YAML text of the pins. Releases whose bodies are all the same share one entry through an alias."""
    lines = [MARKER, "releases:"]
    anchors: dict[tuple[str, str], str] = {}
    for distribution, releases in pins.items():
        lines.append(f"  {distribution}:")
        for release, found in releases.items():
            lines.append(f'    "{release}":' + ("" if found else " {}"))
            for id, pin in found.items():
                content = [f"        variant: {pin.variant or 'upstream'}", "        fingerprints:"]
                content += [f'          {target}: "{value}"' for target, value in pin.fingerprints.items()]
                key = (id, "\n".join(content))
                if key in anchors:
                    lines.append(f"      {id}: *{anchors[key]}")
                else:
                    anchors[key] = f"{id}-{re.sub('[^0-9A-Za-z]', '-', release)}"
                    lines += [f"      {id}: &{anchors[key]}", *content]
    return "\n".join(lines) + "\n"


def write(path: str | os.PathLike[str], text: str) -> bool:
    """Replace the pins in the matrix by `text`; returns whether that changed the file."""
    file = Path(path)
    before = file.read_text("utf-8")
    after = before.partition(MARKER)[0].rstrip("\n") + "\n\n" + text
    if after == before:
        return False
    scratch = file.with_name(file.name + ".new")
    scratch.write_text(after, "utf-8")
    os.replace(scratch, file)
    return True
