"""The choice of commits: few that have all sets of bodies that nobody knows, those most like others first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .walk import Commit, Found

__all__ = ["Chosen", "Unknown", "chosen"]

Unknown = Mapping[Commit, Sequence[Found]]  # by commit the patches whose bodies no release has


@dataclass(frozen=True)
class Chosen:
    """A commit to prove, and the patches that have a set of bodies there which nothing has judged."""

    commit: Commit
    new: tuple[Found, ...]


def chosen(unknown: Unknown, judged: Callable[[Found], bool], preferred: Callable[[Commit], bool]) -> Iterator[Chosen]:
    """The next commit each time, until all sets are judged. `judged` is asked again after each.

    A set counts for as many commits as have it, so that the first commits serve most. Preferred commits come first,
    and until they are done only they count.
    """
    for commits in ([commit for commit in unknown if preferred(commit)], list(unknown)):
        having = Counter((found.entry.id, found.digest) for commit in commits for found in unknown[commit])
        left = {commit: list(unknown[commit]) for commit in commits}
        tried: set[Commit] = set()
        while True:
            worth: dict[Commit, int] = {}
            for commit in left:
                left[commit] = [found for found in left[commit] if not judged(found)]
                worth[commit] = sum(having[found.entry.id, found.digest] for found in left[commit])
            best = max((commit for commit in left if commit not in tried), key=worth.__getitem__, default=None)
            if best is None or not worth[best]:
                break
            tried.add(best)  # whatever comes of it, so that this ends
            yield Chosen(best, tuple(left[best]))
