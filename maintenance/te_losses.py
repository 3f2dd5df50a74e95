"""The table of the losses of each megatron-core with each TE release: lost_names.json, written by `shim pin`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from shim._releases.sources import Sources
from shim._te.tables import MEGATRON, TE, expanded, spans

from .te_interpreter import Loss, Megatron, Pair, TeRelease

__all__ = ["MORE_TE", "measure_losses", "render_losses"]

# TE releases that images have beside an old megatron-core. They are measured, but not supported and not tested.
MORE_TE = ("1.11.0", "1.13.0")


def measure_losses(
    megatrons: Iterable[tuple[str, Path]],
    te_releases: Iterable[tuple[str, Path]],
    progress: Callable[[str], None] = lambda text: None,
    before: Mapping[str, Any] | None = None,
    kept: Collection[str] | None = None,
) -> dict[str, Any]:
    """The losses of every pair of releases. Each release is unpacked in a directory. `progress` is told each pair.

    before: such a table of the same code, whose pairs are not measured again.
    kept: only pairs with these TE releases are taken from it.
    """
    known = {} if before is None else _pairs(before)
    known = {pair: lost for pair, lost in known.items() if kept is None or pair[1] in kept}
    ordered = sorted(te_releases, key=lambda item: Version(item[0]))
    opened = [(release, TeRelease(Version(release), Sources([root]))) for release, root in ordered]
    wanted_by: dict[tuple[str, str, tuple[str, ...]], dict[str, list[str]]] = {}
    releases: list[str] = []
    for release, root in megatrons:
        releases.append(release)
        megatron = None
        for te_release, te in opened:
            progress(f"what megatron-core {release} loses with transformer-engine {te_release}")
            found = known.get((release, te_release))
            if found is None:
                megatron = megatron or Megatron(Sources([root]), root / "megatron" / "core")
                found = _by_place(Pair(megatron, te).losses())
            for key in found:
                wanted_by.setdefault(key, {}).setdefault(release, []).append(te_release)
    order = [release for release, _ in opened]
    return {
        MEGATRON: releases,
        TE: order,
        "losses": [
            {"name": name, "module": module, "what": list(what), "on": _on(found, releases, order)}
            for (name, module, what), found in sorted(wanted_by.items())
        ],
    }


def _pairs(table: Mapping[str, Any]) -> dict[tuple[str, str], list[tuple[str, str, tuple[str, ...]]]]:
    """The losses of each pair of a table. A pair without losses has an empty list."""
    found: dict[tuple[str, str], list[tuple[str, str, tuple[str, ...]]]] = {
        (megatron, te): [] for megatron in table[MEGATRON] for te in table[TE]
    }
    for loss in table["losses"]:
        for wanting, lacking in loss["on"].items():
            for megatron in expanded(wanting, table[MEGATRON]):
                for te in expanded(lacking, table[TE]):
                    found[megatron, te].append((loss["name"], loss["module"], tuple(loss["what"])))
    return found


def _by_place(losses: Iterable[Loss]) -> list[tuple[str, str, tuple[str, ...]]]:
    what: dict[tuple[str, str], list[str]] = {}
    for loss in losses:
        what.setdefault((loss.name, loss.module), []).append(loss.what)
    return [(name, module, tuple(sorted(found))) for (name, module), found in what.items()]


def _on(found: Mapping[str, Sequence[str]], megatrons: Sequence[str], te_releases: Sequence[str]) -> dict[str, str]:
    """``{releases of megatron-core: TE releases}``. Releases with the same TE releases share an entry."""
    grouped: dict[str, list[str]] = {}
    for release, lacking in found.items():
        grouped.setdefault(spans(lacking, te_releases), []).append(release)
    return {spans(releases, megatrons): lacking for lacking, releases in grouped.items()}


def render_losses(table: Mapping[str, Any]) -> str:
    """The text of lost_names.json, with one line for each name and module."""
    heads = [f" {json.dumps(name)}: {json.dumps(table[name])}," for name in (MEGATRON, TE)]
    lines = ",\n".join("  " + json.dumps(loss) for loss in table["losses"])
    return "\n".join(["{", *heads, ' "losses": [', lines, " ]", "}"]) + "\n"
