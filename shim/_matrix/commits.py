"""Commits in a matrix: source states between releases that shim is pinned to."""

from __future__ import annotations

from shim._record import record

__all__ = ["MAIN", "NOT_NEEDED", "RIGHT", "UPSTREAM", "Commit"]

MAIN = "main"  # the branch of tomorrow's release
# Stands for a variant if a release is right without the patch: it has fixed the defect, or never had it.
UPSTREAM = "upstream"
NOT_NEEDED = "not-needed"
RIGHT = (UPSTREAM, NOT_NEEDED)


@record
class Commit:
    """One commit of a repository.

    commit: its hash, 40 digits. `name` is the beginning of it.
    version: of the sources, a pre-release if they come before the release.
    date: the day it was committed (UTC).    of: the branch or tag that it is of, and who pins it.
    """

    name: str
    commit: str
    version: str
    date: str
    of: str

    @property
    def branch(self) -> str:
        return self.of.partition(",")[0].strip()

    @property
    def tagged(self) -> bool:
        """Whether it is a release that the package index has no wheel of."""
        return self.branch.startswith("tag ")

    def __str__(self) -> str:
        return f"commit {self.name} ({self.branch} of {self.date})"
