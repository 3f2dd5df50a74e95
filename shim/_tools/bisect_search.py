"""The search of `shim bisect`: which few of many patches change what a command does. It runs nothing itself."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

__all__ = ["Found", "Step", "most_runs", "search"]


class Step(NamedTuple):
    """A question: does a run with only the patches `kept` differ from one without any?

    left: the most runs that follow, this one included, if `together` is as it is.
    together: whether no single patch changes the result alone, so that the search looks for several.
    why: the place of the question in the search, in words.
    """

    kept: frozenset[str]
    left: int
    together: bool
    why: str


class Found(NamedTuple):
    """patches: a set that changes the result, and no longer does so without any one of them.

    rest_changes: whether all other patches change the result as well. False if there are none.
    """

    patches: tuple[str, ...]
    rest_changes: bool


Questions = Generator[Step, bool, "tuple[str, ...]"]


def most_runs(patches: int) -> int:
    """The most runs that it takes to find one patch among so many, if this patch alone changes the result."""
    return 0 if patches < 2 else 2 + most_runs((patches + 1) // 2)


def search(patches: Sequence[str]) -> Generator[Step, bool, Found]:
    """Ask about sets of patches until the smallest is found, by delta debugging (Zeller 1999, "Yesterday, my program
    worked. Today, it does not. Why?").

    Send True for a run that differs from one without patches, and False for one that does not, or that tells nothing.
    A run with all patches differs, else there is nothing to search. No set is asked about twice. Whatever the answers
    are, a run with the returned patches alone was seen to differ, unless they are all there are.
    """
    return (yield from _Search(patches).found())


class _Search:
    def __init__(self, patches: Sequence[str]) -> None:
        self.all = tuple(patches)
        self.known = {frozenset(patches): True, frozenset(): False}
        self.together = False
        self.owed = 1  # runs after those of the question at hand: at the end the one without what was found

    def found(self) -> Generator[Step, bool, Found]:
        causes = yield from self._among(self.all, frozenset())
        causes = yield from self._smallest(causes)
        rest = frozenset(self.all) - frozenset(causes)
        self.owed = 0
        changes = yield from self._ask(rest, 0, "all but what was found")
        return Found(causes, changes)

    def _among(self, some: tuple[str, ...], kept: frozenset[str]) -> Questions:
        """The patches of `some` that are needed: with `kept` they change the result, and `kept` alone does not."""
        if len(some) < 2:
            return some
        middle = (len(some) + 1) // 2
        first, second = some[:middle], some[middle:]
        beside = " beside those that are needed" if kept else ""
        left = most_runs(len(first))
        if (yield from self._ask(kept.union(first), 1 + left, f"the first half{beside}")):
            return (yield from self._among(first, kept))
        if (yield from self._ask(kept.union(second), left, f"the second half{beside}")):
            return (yield from self._among(second, kept))
        # Neither half is enough. What is needed of each is found while the other half, or what it needs, is kept.
        self.owed += most_runs(len(second)) + (0 if self.together else 2)
        self.together = True
        of_first = yield from self._among(first, kept.union(second))
        self.owed -= most_runs(len(second))
        return (*of_first, *(yield from self._among(second, kept.union(of_first))))

    def _smallest(self, causes: tuple[str, ...]) -> Questions:
        """`causes` without those that are not needed. None is left over if more patches never undo what fewer do."""
        self.owed = 1
        for place, one in enumerate(causes, 1):
            fewer = tuple(other for other in causes if other != one)
            if (yield from self._ask(frozenset(fewer), len(causes) - place, f"what was found without {one}")):
                return (yield from self._smallest(fewer))
        return causes

    def _ask(self, kept: frozenset[str], left: int, why: str) -> Generator[Step, bool, bool]:
        """left: the most runs after this one for the question at hand."""
        if kept not in self.known:
            self.known[kept] = yield Step(kept, 1 + left + self.owed, self.together, why)
        return self.known[kept]
