"""Pins: measure variants and fingerprints on real releases, and write them into version_matrix.yaml."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from shim._detect import Environment, Installed
from shim._errors import MatrixError, SourceError
from shim._fingerprint import fingerprint
from shim._matrix import Matrix, PatchEntry, Pin
from shim._sources import Sources
from shim._versions import parse_version

__all__ = ["MARKER", "measure", "release_environment", "render", "write"]

MARKER = "# --- Below: written by `shim pin` from the wheels. Never by hand. ---"


def release_environment(distribution: str, package: str, release: str, root: str | os.PathLike[str]) -> Environment:
    """An environment that holds just this release, unpacked below `root`; nothing of it is imported."""
    installed = Installed(distribution, package, str(root), release, "unpacked wheel")
    return Environment({distribution: installed}, Sources([root]))


def _measure(entry: PatchEntry, distribution: str, release: str, sources: Sources) -> Pin | None:
    version = parse_version(release)
    rule = None if version is None else entry.rule_for({distribution: version})
    if rule is None or rule.variant is None:
        return None
    variant = entry.variants[rule.variant]
    try:
        return Pin(variant.name, {t: fingerprint(sources, variant.body_of(t)) for t in variant.bodies})
    except SourceError as error:
        raise MatrixError(
            f"{entry.id}: the rules give variant {variant.name} to {distribution} {release}, but {error}. "
            "Remedy: correct the targets of the variant or the ranges in version_matrix.yaml."
        ) from None


def measure(
    matrix: Matrix, fetch: Callable[[str, str], Path], progress: Callable[[str, str], None] | None = None
) -> dict[str, dict[str, dict[str, Pin]]]:
    """Fingerprints of every patch on every supported release; `fetch(distribution, release)` gives its sources."""
    pins: dict[str, dict[str, dict[str, Pin]]] = {}
    for distribution, releases in matrix.supported.items():
        for release in releases:
            if progress is not None:
                progress(distribution, release)
            sources = Sources([fetch(distribution, release)])
            found = {
                id: pin
                for id, entry in matrix.patches.items()
                if entry.distribution == distribution and (pin := _measure(entry, distribution, release, sources))
            }
            pins.setdefault(distribution, {})[release] = found
    return pins


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
                    anchors[key] = f"{id}-{release.replace('.', '-')}"
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
