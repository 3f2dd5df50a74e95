"""What the changelog says of a patch, by version: CHANGELOG.md, and the fragments in changes/ for the next release."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from shim._matrix import load

__all__ = ["UNRELEASED", "News", "news_of"]

UNRELEASED = "Unreleased"
HEADING = re.compile(r"## \[(?P<version>[^\]]+)\]")
# A line is about the patches that its beginning names, and only mentions those further on.
BEGINNING = 90  # characters


class News(NamedTuple):
    """A line of the changelog. version: of shim, or UNRELEASED."""

    version: str
    text: str


def news_of(id: str, since: str | None = None, top: Path | None = None) -> list[News]:
    """The lines about a patch, the newest version first; those of the next release before all others.

    since: only of versions after this one, and of the next release.    top: where the changelog lies; default shim's.
    """
    if top is None:
        top = next((place for place in (load.PACKAGE.parent, load.PACKAGE) if _is_there(place)), load.PACKAGE)
    found = [News(UNRELEASED, _in_one_line(file)) for file in sorted((top / "changes").glob(f"{id}.*.md"))]
    named = re.compile(rf"(?<![\w-]){re.escape(id)}(?![\w-])")
    lines = [line for line in _lines(top) if not _is_list(line.text) and _after(line.version, since)]
    return found + [line for line in lines if named.search(line.text[:BEGINNING])]


def _is_list(text: str) -> bool:
    """Whether a line counts patches up, as that of the first release, and says nothing of a single one."""
    return len(re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)+,", text[:BEGINNING])) > 1


def _is_there(top: Path) -> bool:
    # Beside an installed shim lie other packages, with files of their own.
    return (top / "CHANGELOG.md").is_file() and (top == load.PACKAGE or (top / "version_matrix.yaml").is_file())


def _lines(top: Path) -> Iterator[News]:
    version, text = "", ""
    for line in [*_text(top / "CHANGELOG.md").splitlines(), ""]:
        goes_on = text and line.strip() and not line.startswith(("- ", "#", "<!--"))
        if text and not goes_on:
            yield News(version, text)
            text = ""
        if goes_on:
            text += f" {line.strip()}"
        elif line.startswith("- "):
            text = line[2:].strip()
        elif heading := HEADING.match(line):
            version = heading["version"]


def _in_one_line(file: Path) -> str:
    return " ".join(_text(file).split())


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _after(version: str, since: str | None) -> bool:
    try:
        return since is None or version == UNRELEASED or Version(version) > Version(since)
    except InvalidVersion:
        return True
