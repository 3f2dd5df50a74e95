"""Version strings as releases really write them, and ranges that admit pre-releases."""

from __future__ import annotations

from functools import lru_cache

from packaging.specifiers import SpecifierSet
from packaging.version import Version

__all__ = ["in_range", "parse_range", "parse_version"]


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
