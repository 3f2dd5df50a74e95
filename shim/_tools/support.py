"""The variants of all patches on all supported releases and commits: data, text, and pins that disagree."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from shim._matrix.model import UPSTREAM, Matrix

__all__ = ["stale", "support", "support_text"]


def support(matrix: Matrix) -> dict[str, dict[str, dict[str, str]]]:
    """``{distribution: {release or commit: {patch id: variant, "upstream", "not-needed", or "-"}}}``."""
    return {
        distribution: {
            name: {id: matrix.wanted(id, name) or "-" for id in _patches(matrix, distribution)}
            for name in matrix.names(distribution)
        }
        for distribution in {**matrix.supported, **matrix.commits}
    }


def _patches(matrix: Matrix, distribution: str) -> list[str]:
    return [id for id, entry in matrix.patches.items() if entry.distribution == distribution]


def support_text(matrix: Matrix) -> str:
    """For each patch its variants, each with the releases and commits that get it, in lines for people."""
    lines: list[str] = []
    width = max(map(len, matrix.patches), default=0)
    for distribution, rows in support(matrix).items():
        lines += ["", f"{distribution}:"]
        for id in _patches(matrix, distribution):
            parts = [f"{gets}: {', '.join(where)}" for gets, where in _places(matrix, distribution, id, rows).items()]
            lines.append(f"  {id:<{width}}  {'; '.join(parts)}".rstrip())
    return "\n".join(lines[1:])


def _places(matrix: Matrix, distribution: str, id: str, rows: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """The spans of releases and the commits at which a patch has each variant, or none for a reason."""
    found: dict[str, list[str]] = {}
    releases = [(release, rows[release][id]) for release in matrix.supported.get(distribution, ())]
    for gets, span in itertools.groupby(releases, key=lambda pair: pair[1]):
        names = [release for release, _ in span]
        found.setdefault(gets, []).append(names[0] if len(names) == 1 else f"{names[0]} - {names[-1]}")
    for name in matrix.commits.get(distribution, {}):
        found.setdefault(rows[name][id], []).append(name)
    found.pop("-", None)
    return found


def stale(matrix: Matrix) -> list[str]:
    """Where pins disagree with the rules, the supported list and the commits. Bodies are not compared."""
    found: list[str] = []
    for distribution in {**matrix.supported, **matrix.commits}:
        for name in matrix.names(distribution):
            pins = matrix.pins.get(distribution, {}).get(name, {})
            shown = f"{distribution} {matrix.shown(distribution, name)}"
            for entry in matrix.patches.values():
                if entry.distribution != distribution:
                    continue
                pin, wanted = pins.get(entry.id), matrix.pinned_as(entry.id, name)
                if pin is None and wanted not in (None, UPSTREAM):
                    found.append(f"{shown} lacks a pin of {entry.id}, variant {wanted}")
                elif pin is not None and (pin.variant or UPSTREAM) != wanted:
                    pinned = pin.variant or UPSTREAM
                    found.append(f"{shown} pins {pinned} of {entry.id}; the rules say {wanted or 'nothing'}")
    return found
