"""Version strings as releases really write them, and ranges that admit pre-releases."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from packaging.version import Version

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

__all__ = ["in_range", "parse_range", "parse_version", "with_prereleases"]

INTERVAL = re.compile(r"\s*(?:>=\s*([0-9.]+\.dev0))?\s*,?\s*(?:<\s*([0-9.]+\.dev0))?\s*")
BOUND = r"(>=|<)(\s*v?[0-9]+(\.[0-9]+)*)(?=\s*(,|$))"


@lru_cache(maxsize=512)
def parse_version(raw: str | None) -> Version | None:
    """Return the version, or None where `raw` is not a PEP 440 version (vendor strings, broken files)."""
    if raw is None:
        return None
    try:
        return Version(raw)
    except ValueError:  # InvalidVersion, and int() of more digits than it reads
        return None


@lru_cache(maxsize=512)
def parse_range(spec: str) -> SpecifierSet:
    """Return the specifier set of `spec`; ValueError where it is not one, or compares text (``===``)."""
    from packaging.specifiers import SpecifierSet  # here, because a plan needs it only for what is no plain interval

    found = SpecifierSet(spec)
    for part in found:
        Version(part.version.removesuffix(".*"))
    return found


def in_range(version: Version, spec: str) -> bool:
    """Whether the public part of `version` lies in `spec`.

    Pre-releases always count: packaging's default for them changed between releases, and what RL images run is
    mostly a release candidate or a development version. The local part (``+abc``) never decides.
    """
    public = Version(version.public) if version.local else version
    bounds = _interval(spec)
    if bounds is None:
        return parse_range(spec).contains(public, prereleases=True)
    low, high = bounds
    return (low is None or public >= low) and (high is None or public < high)


@lru_cache(maxsize=512)
def _interval(spec: str) -> tuple[Version | None, Version | None] | None:
    """The bounds of ``>=low,<high``, or of half of it, where both are the first of their kind; None for all others.

    PEP 440 keeps the pre-releases of `high` out of ``<high``; there are none before a development release 0.
    """
    found = INTERVAL.fullmatch(spec)
    if found is None:
        return None
    low, high = (Version(part) if part else None for part in found.groups())
    return low, high


def with_prereleases(spec: str) -> str:
    """`spec` with each release in ``>=`` and ``<`` as its first development version: ``<1.2`` as ``<1.2.dev0``.

    So that 1.2rc1 belongs to what starts at 1.2, and not to what ends there.
    """
    return re.sub(BOUND, r"\1\2.dev0", spec)
