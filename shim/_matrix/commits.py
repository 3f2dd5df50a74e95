"""Commits in a matrix: source states between releases that shim is pinned to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["MAIN", "NONE", "NOT_NEEDED", "RIGHT", "UPSTREAM", "Commit"]

MAIN = "main"  # the branch of tomorrow's release
# Stands for a variant if a release is right without the patch: it has fixed the defect, or never had it.
UPSTREAM = "upstream"
NOT_NEEDED = "not-needed"
RIGHT = (UPSTREAM, NOT_NEEDED)
NONE = "none"  # stands for a variant: the patch has no pin on the commit, whatever the rules say


@dataclass(frozen=True)
class Commit:
    """One commit of a repository.

    commit: its hash, 40 digits. `name` is the beginning of it.
    version: of the sources, a pre-release if they come before the release.
    date: the day it was committed (UTC).    of: the branch or tag that it is of, and who pins it.
    variants: the variant, UPSTREAM, NOT_NEEDED or NONE of a patch by id, if the rules for `version` are wrong on
        this commit.
    """

    name: str
    commit: str
    version: str
    date: str
    of: str
    variants: Mapping[str, str] = field(default_factory=dict)

    @property
    def branch(self) -> str:
        return self.of.partition(",")[0].strip()

    @property
    def tagged(self) -> bool:
        """Whether it is a release that the package index has no wheel of."""
        return self.branch.startswith("tag ")

    def __str__(self) -> str:
        return f"commit {self.name} ({self.branch} of {self.date})"
