"""Reading the commits of a matrix, the key ``commits``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from typing import TYPE_CHECKING

from shim._matrix.commits import Commit
from shim._matrix.model import DISTRIBUTIONS

if TYPE_CHECKING:
    import yaml

    from shim._matrix.reader import Reader

__all__ = ["COMMIT_KEYS", "NAME_LENGTH", "read_commits"]

NAME_LENGTH = 10  # the hexadecimal digits of a commit that name it
COMMIT_KEYS = {"commit": True, "version": True, "date": True, "of": True}
HASH = re.compile(r"[0-9a-f]{40}")
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def read_commits(
    read: Reader, node: yaml.Node, supported: Mapping[str, tuple[str, ...]]
) -> dict[str, dict[str, Commit]]:
    """The commits in `node` by distribution and name, in the order of their dates. MatrixError names file and line."""
    found: dict[str, dict[str, Commit]] = {}
    for distribution, commits in read.mapping(node, "commits", dict.fromkeys(DISTRIBUTIONS, False)).items():
        before = ""
        for name, item in read.mapping(commits, f"commits of {distribution}").items():
            commit = _commit(read, name, item)
            if name in supported.get(distribution, ()):
                raise read.fail(item, f"{name} is both a release and a commit of {distribution}")
            if commit.date < before:
                raise read.fail(item, f"commit {name} is of {commit.date}, but stands after one of {before}")
            before = commit.date
            found.setdefault(distribution, {})[name] = commit
    return found


def _commit(read: Reader, name: str, node: yaml.Node) -> Commit:
    given = read.mapping(node, f"commit {name}", COMMIT_KEYS)
    texts = {key: read.quoted(given[key], f"the {key} of commit {name}") for key in ("commit", "date")}
    if not HASH.fullmatch(texts["commit"]):
        raise read.fail(given["commit"], f"{texts['commit']!r} is not a commit: 40 hexadecimal digits, in lower case")
    if name != texts["commit"][:NAME_LENGTH]:
        first = texts["commit"][:NAME_LENGTH]
        raise read.fail(node, f"a commit is named by its first {NAME_LENGTH} digits: {first}, not {name}")
    if not _is_day(texts["date"]):
        raise read.fail(given["date"], f"the date of commit {name} is {texts['date']!r}; write it as 2026-08-22")
    return Commit(
        name,
        texts["commit"],
        read.version(given["version"], f"the version of commit {name}"),
        texts["date"],
        read.text(given["of"], f"what commit {name} is of"),
    )


def _is_day(text: str) -> bool:
    if not DATE.fullmatch(text):
        return False
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True
