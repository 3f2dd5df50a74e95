"""Version strings as releases really write them, and ranges that admit pre-releases."""

from __future__ import annotations

import re
from functools import lru_cache

from packaging.specifiers import SpecifierSet
from packaging.version import Version

__all__ = ["in_range", "parse_range", "parse_version", "with_prereleases"]

BOUND = re.compile(r"(>=|<)(\s*v?[0-9]+(\.[0-9]+)*)(?=\s*(,|$))")


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
    found = SpecifierSet(spec)
    for part in found:
        Version(part.version.removesuffix(".*"))
    return found


def in_range(version: Version, spec: str) -> bool:
    """Whether the public part of `version` lies in `spec`.

    Pre-releases always count: packaging's default for them changed between releases, and what RL images run is
    mostly a release candidate or a development version. The local part (``+abc``) never decides.
    """
    return parse_range(spec).contains(Version(version.public), prereleases=True)


def with_prereleases(spec: str) -> str:
    """`spec` with each release in ``>=`` and ``<`` as its first development version: ``<1.2`` as ``<1.2.dev0``.

    So that 1.2rc1 belongs to what starts at 1.2, and not to what ends there.
    """
    return BOUND.sub(r"\1\2.dev0", spec)
