"""What a patch keeps in the process beside its functions: buffers, flags, an override that is entered.

The `bindings()` of a patch says so with what it returns:

    stash = Stash(options)
    return Bindings({TARGET: functools.partial(_forward, stash=stash)}, Kept(stash.held, stash.release))

status() then tells of it (``report[id].holds``), and revert(), or an apply() that does not take the patch with these
options, ends it. State that lives no longer than a call, or in what the call returns, needs no entry. Nor does what
only the functions of `bindings()` hold on to: the engine lets go of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ["Bindings", "Kept"]


class Kept(NamedTuple):
    """One thing that is kept. Both functions are called at any time, from any thread, and more than once.

    tells: says in a few words what is kept at this moment, with its size; "" where nothing is.
    release: ends it as far as it can be ended now. None where nobody but the user can end it: the header of the patch
        says so then, and status() goes on telling of it.
    """

    tells: Callable[[], str]
    release: Callable[[], None] | None = None


class Bindings(dict[str, Callable[[Any], Any]]):
    """The factories of a patch by target, and what the patch keeps."""

    def __init__(self, factories: Mapping[str, Callable[[Any], Any]], *kept: Kept) -> None:
        super().__init__(factories)
        self.kept = kept
