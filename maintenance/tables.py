"""Tables that maintenance writes: pins, files of known releases and trees, and the page of releases."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shim._matrix.model import UPSTREAM, Matrix, PatchEntry, Pin, Pinned
from shim._printing.markdown import plain
from shim._releases.known_files import SHORT, KnownFiles, Packed
from shim._tools.support import support

__all__ = ["packed", "recorded_pins", "render_files", "render_packed", "render_pins", "support_table"]


def _by_body(pins: Mapping[str, Mapping[str, Mapping[str, Pin]]]) -> dict[str, dict[str, Pinned]]:
    """Turn pins by distribution, release and patch into ``{patch: {variant: {target: {body: releases}}}}``."""
    found: dict[str, Any] = {}
    for releases in pins.values():
        for release, ids in releases.items():
            for id, pin in ids.items():
                targets = found.setdefault(id, {}).setdefault(pin.variant or UPSTREAM, {})
                for target, body in pin.fingerprints.items():
                    targets.setdefault(target, {}).setdefault(body, []).append(release)
    return found


def render_pins(pins: Mapping[str, Mapping[str, Mapping[str, Pin]]]) -> str:
    """The text of the file: a line for each body, with the releases that have it.

    Patches stand by their ids, so that the pins of two new ones seldom meet at one line.
    """
    return _text(dict(sorted(_by_body(pins).items())), "") + "\n"


def _text(value: Any, indent: str) -> str:
    if isinstance(value, list) or not value:
        return json.dumps(value)
    inner = indent + "  "
    lines = (f"{inner}{json.dumps(key)}: {_text(item, inner)}" for key, item in value.items())
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def recorded_pins(content: bytes, patches: Mapping[str, PatchEntry]) -> Mapping[str, Mapping[str, Mapping[str, Pin]]]:
    """The pins in `content` by distribution, release and patch, as they were written: the rules may have changed since.

    Empty if they cannot be read. Patches that have gone are left out.
    """
    found: dict[str, dict[str, dict[str, Pin]]] = {}
    try:
        for id, variants in json.loads(content).items():
            releases = found.setdefault(patches[id].distribution, {}) if id in patches else {}
            for variant, targets in variants.items():
                for target, bodies in targets.items():
                    for body, names in bodies.items():
                        for name in names:
                            pin = Pin(None if variant == UPSTREAM else variant, {})
                            pin = releases.setdefault(name, {}).setdefault(id, pin)
                            releases[name][id] = Pin(pin.variant, {**pin.fingerprints, target: body})
    except (ValueError, AttributeError, TypeError, RecursionError):
        return {}
    return found


def packed(table: KnownFiles) -> dict[str, dict[str, Any]]:
    """The table as `shim._releases.known_files.unpacked` reads it."""
    found: dict[str, dict[str, Any]] = {}
    for module, digests in sorted(table.items()):
        names = sorted({name for bodies in digests.values() for name in bodies})
        values = {name: sorted({bodies[name] for bodies in digests.values() if name in bodies}) for name in names}
        rows: dict[str, list[str]] = {}
        for digest, bodies in sorted(digests.items()):
            row = (str(values[name].index(bodies[name])) if name in bodies else "-" for name in names)
            rows.setdefault(" ".join(row), []).append(digest[:SHORT])
        files = {row: " ".join(dict.fromkeys(digests)) for row, digests in rows.items()}
        found[module] = {"names": names, "bodies": list(values.values()), "files": files}
    return found


def render_packed(table: Packed) -> str:
    """The text of a packed table, with one line for each module."""
    return "{\n" + ",\n".join(f'  "{module}": {json.dumps(table[module])}' for module in sorted(table)) + "\n }"


def render_files(table: KnownFiles) -> str:
    """The text of the table, with one line for each file, so that a diff shows the files of a new release."""
    modules = []
    for module, digests in sorted(table.items()):
        lines = (f'  "{digest}": {json.dumps(bodies, sort_keys=True)}' for digest, bodies in sorted(digests.items()))
        modules.append(f'"{module}": {{\n' + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(modules) + "\n}\n"


def support_table(matrix: Matrix) -> str:
    """Markdown tables: patches down, releases across, and then commits across.

    Releases with equal columns share one.
    """
    tables: list[str] = []
    for distribution, rows in support(matrix).items():
        columns: list[tuple[str, str, Mapping[str, str]]] = []
        for release in matrix.supported.get(distribution, ()):
            if columns and columns[-1][2] == rows[release]:
                columns[-1] = (columns[-1][0], release, rows[release])
            else:
                columns.append((release, release, rows[release]))
        heads = [first if first == last else f"{first} - {last}" for first, last, _ in columns]
        ids = [id for id, entry in matrix.patches.items() if entry.distribution == distribution]
        if columns:
            tables.append(_table(distribution, ids, heads, [row for _, _, row in columns]))
        commits = matrix.commits.get(distribution, {})
        if commits:
            heads = [f"{commit.name}: {commit.of}, {commit.date}" for commit in commits.values()]
            tables.append(_table(f"{distribution} at commit", ids, heads, [rows[name] for name in commits]))
    return "\n\n".join(tables)


def _table(corner: str, ids: Sequence[str], heads: Sequence[str], columns: Sequence[Mapping[str, str]]) -> str:
    lines = [f"| {corner} | " + " | ".join(map(plain, heads)) + " |", "|---" * (len(heads) + 1) + "|"]
    lines += [f"| {id} | " + " | ".join(column[id] for column in columns) + " |" for id in ids]
    return "\n".join(lines)
