"""Installers' records about a distribution: versions and origins, read from the metadata on sys.path.

Importing importlib.metadata takes longer than a whole plan, so this module reads directories itself. It uses
importlib.metadata only for archives, and if other finders know distributions. Both are rare.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import PathFinder
from typing import NamedTuple

from shim._errors import SourceError
from shim._releases.files import read_beginning

__all__ = ["Recorded", "recorded"]

FILE_LIMIT = 1_000_000  # bytes; the largest real METADATA has 100 kB


class Recorded(NamedTuple):
    """One installation: its version, the directory that its files are relative to, the text of its direct_url.json."""

    version: str | None
    directory: str
    direct_url: str | None


def recorded(distribution: str) -> Iterator[Recorded]:
    """Every installation of `distribution` with metadata on sys.path, in the order of sys.path."""
    others = [finder for finder in sys.meta_path if finder is not PathFinder and hasattr(finder, "find_distributions")]
    if others:
        yield from _by_importlib(distribution, sys.path)
        return
    for entry in sys.path:
        if os.path.isfile(entry):
            yield from _by_importlib(distribution, [entry])
        else:
            yield from _in_directory(distribution, entry or os.curdir)


def _in_directory(distribution: str, directory: str) -> Iterator[Recorded]:
    wanted = _normalised(distribution)
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        if not name.endswith((".dist-info", ".egg-info")):
            continue
        if _normalised(name.rpartition(".")[0].partition("-")[0]) == wanted:
            home = os.path.join(directory, name)
            text = _text(home, "METADATA") or _text(home, "PKG-INFO") or _text(home)
            yield Recorded(_version(text or ""), directory, _text(home, "direct_url.json"))


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _text(*parts: str) -> str | None:
    try:
        return read_beginning(os.path.join(*parts), FILE_LIMIT).decode("utf-8")
    except (SourceError, UnicodeDecodeError):
        return None


def _version(text: str) -> str | None:
    """The version in the header of metadata. The header ends at the first empty line."""
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if not line.strip():
            return None
        if colon and key.strip().lower() == "version":
            return value.strip() or None
    return None


def _by_importlib(distribution: str, path: Sequence[str]) -> Iterable[Recorded]:
    from importlib import metadata

    for found in metadata.distributions(name=distribution, path=list(path)):
        try:
            version = found.metadata["Version"]
        except UnicodeDecodeError:
            version = None
        yield Recorded(version, str(found.locate_file("")), found.read_text("direct_url.json"))
