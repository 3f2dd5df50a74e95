"""Check that exactly one rule of a patch holds for every release: no gaps, no overlaps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import yaml
from packaging.version import Version

from shim._errors import MatrixError
from shim._matrix.reader import Reader
from shim._releases.versions import parse_range

if TYPE_CHECKING:
    from shim._matrix.model import PatchEntry

__all__ = ["check_coverage"]


def _samples(specs: Iterable[str], supported: Iterable[str]) -> list[Version]:
    """Versions at, just below and just above every boundary. They show each gap and each overlap of intervals."""
    found: set[Version] = {Version(release) for release in supported}
    for spec in specs:
        for part in parse_range(spec):
            base = Version(part.version.removesuffix(".*"))
            numbers = ".".join(map(str, base.release))
            found |= {base, *(Version(numbers + suffix) for suffix in (".dev0", "rc1", "", ".post1", ".999"))}
            last = max((i for i, number in enumerate(base.release) if number), default=0)
            below = [*base.release[:last], max(base.release[last] - 1, 0), 999]
            found.add(Version(".".join(map(str, below))))
    return sorted(found)


def check_coverage(read: Reader, node: yaml.Node, entry: PatchEntry, supported: Mapping[str, tuple[str, ...]]) -> None:
    """Raise MatrixError, with the line of the rule or of the patch, if ranges of `entry` overlap or leave a gap."""
    axes = list(dict.fromkeys(name for rule in entry.rules for name in rule.ranges))
    samples = {
        axis: _samples((r.ranges[axis] for r in entry.rules if axis in r.ranges), supported.get(axis, ()))
        for axis in axes
    }
    covered = {}
    for point in itertools.product(*samples.values()):
        versions = dict(zip(axes, point))
        hits = [rule for rule in entry.rules if rule.holds(versions)]
        shown = ", ".join(f"{name} {version}" for name, version in versions.items())
        if len(hits) > 1:
            raise MatrixError(
                f"{read.path}:{hits[1].line}: ranges of {entry.id} overlap: {shown} lies in this rule and in "
                f"that of line {hits[0].line}"
            )
        covered[point] = bool(hits)
    edges = []
    for i, axis in enumerate(axes):
        spoken_of = [Version(release) for release in supported.get(axis, ())]
        spoken_of += [point[i] for point, hit in covered.items() if hit]
        edges.append((min(spoken_of), max(spoken_of)) if spoken_of else (Version("1"), Version("0")))
    for point, hit in covered.items():
        if not hit and all(first <= version <= last for version, (first, last) in zip(point, edges)):
            shown = ", ".join(f"{name} {version}" for name, version in zip(axes, point))
            raise read.fail(node, f"ranges of {entry.id} leave a gap: no rule covers {shown}")
