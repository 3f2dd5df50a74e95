"""A patch to be written: its targets, and their bodies in all releases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shim._releases.fingerprint import signature_part

__all__ = ["Body", "Proposal", "span"]


def span(releases: Sequence[str]) -> str:
    return releases[0] if len(releases) == 1 else f"{releases[0]} - {releases[-1]}"


@dataclass(frozen=True)
class Body:
    """Neighbouring releases with the same bodies of all targets. `fingerprints` is empty if a target is missing."""

    releases: tuple[str, ...]
    fingerprints: tuple[str, ...]
    number: int = 0  # counts bodies from 1. Releases that are no neighbours may have the same number.

    @property
    def signature(self) -> tuple[str, ...]:
        return tuple(map(signature_part, self.fingerprints))

    @property
    def span(self) -> str:
        return span(self.releases)

    def __str__(self) -> str:
        return f"{f'body {self.number}' if self.fingerprints else 'not there':<10} {self.span}"


@dataclass(frozen=True)
class Proposal:
    """A patch to be written: its targets, their bodies, and the variants that these suggest.

    `variants` maps a name to the neighbouring releases that get it. `without` lists the releases that lack a target.
    """

    id: str
    distribution: str
    targets: tuple[str, ...]
    bodies: tuple[Body, ...]
    variants: dict[str, tuple[str, ...]]
    without: tuple[tuple[str, ...], ...]
    kind: str  # what the first target is in the newest release that has it: "function", "class" or "value"

    @property
    def module(self) -> str:
        return f"shim.patches.{self.folder}.{self.name}"

    @property
    def name(self) -> str:
        return self.id.replace("-", "_")

    @property
    def folder(self) -> str:
        return self.distribution.replace("-", "_")

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "distribution": self.distribution,
            "targets": list(self.targets),
            "bodies": [{"releases": list(b.releases), "fingerprints": list(b.fingerprints)} for b in self.bodies],
            "variants": {name: list(releases) for name, releases in self.variants.items()},
        }
