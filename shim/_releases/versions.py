"""Versions as releases write them, and ranges that admit pre-releases."""

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
    """The version. None if `raw` is not a PEP 440 version (vendor strings, broken files)."""
    if raw is None:
        return None
    try:
        return Version(raw)
    except ValueError:  # InvalidVersion, or int() of too many digits
        return None


@lru_cache(maxsize=512)
def parse_range(spec: str) -> SpecifierSet:
    """The specifier set of `spec`. ValueError if it is none, or compares text (``===``)."""
    from packaging.specifiers import SpecifierSet  # here, because a plan needs it only for unusual ranges

    found = SpecifierSet(spec)
    for part in found:
        Version(part.version.removesuffix(".*"))
    return found


def in_range(version: Version, spec: str) -> bool:
    """Whether the public part of `version` is in `spec`.

    Pre-releases count, because RL images mostly run a release candidate or a development version. packaging's default
    for them has changed between its releases. The local part (``+abc``) never decides.
    """
    public = Version(version.public) if version.local else version
    bounds = _interval(spec)
    if bounds is None:
        return parse_range(spec).contains(public, prereleases=True)
    low, high = bounds
    return (low is None or public >= low) and (high is None or public < high)


@lru_cache(maxsize=512)
def _interval(spec: str) -> tuple[Version | None, Version | None] | None:
    """The bounds of ``>=low,<high``, or of one half of that, if each bound ends in .dev0. None for other ranges.

    PEP 440 keeps the pre-releases of `high` out of ``<high``. Nothing comes before .dev0, so comparing is enough.
    """
    found = INTERVAL.fullmatch(spec)
    if found is None:
        return None
    low, high = map(parse_version, found.groups())  # many ranges share a bound
    return low, high


def with_prereleases(spec: str) -> str:
    """`spec` with .dev0 at each release behind ``>=`` and ``<``: ``<1.2`` becomes ``<1.2.dev0``.

    So 1.2rc1 belongs to the range that starts at 1.2, and not to the range that ends there.
    """
    return re.sub(BOUND, r"\1\2.dev0", spec)
