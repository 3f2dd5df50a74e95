"""The table of the names of Transformer Engine that megatron-core imports: wanted_names.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shim._releases.sources import Sources
from shim._te.names import Names, imported_below

__all__ = ["measure_names", "render_names"]


def measure_names(
    megatrons: Iterable[tuple[str, Path]],
    te_releases: Iterable[tuple[str, Path]],
    before: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
) -> dict[str, dict[str, list[str]]]:
    """For every name that a megatron-core imports: the releases that import it, and the TE releases that have it.

    before: such a table of the same code, whose releases are not read again.
    """
    wanted: dict[str, dict[str, list[str]]] = {}
    before = before or {}
    imported, having = ({r for found in before.values() for r in found[key]} for key in ("wanted_by", "in"))
    for release, root in megatrons:
        if release in imported:
            names_there = {name for name, found in before.items() if release in found["wanted_by"]}
        else:
            names_there = set(imported_below(root / "megatron" / "core", Sources([root])))
        for name in sorted(names_there):
            wanted.setdefault(name, {"wanted_by": [], "in": []})["wanted_by"].append(release)
    for release, root in te_releases:
        names = Names(Sources([root]))
        for name, found in wanted.items():
            if release in before[name]["in"] if name in before and release in having else names.has(name):
                found["in"].append(release)
    return dict(sorted(wanted.items()))


def render_names(names: Mapping[str, Mapping[str, list[str]]]) -> str:
    """The text of wanted_names.json, with one line for each name."""
    lines = (f" {json.dumps(name)}: {json.dumps(found)}" for name, found in names.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"
