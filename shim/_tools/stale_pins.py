"""Pins that do not agree with the rules of their matrix."""

from __future__ import annotations

from shim._matrix.model import UPSTREAM, Matrix

__all__ = ["stale"]


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
