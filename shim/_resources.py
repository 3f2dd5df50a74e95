"""Resources that a patch holds in the process besides its functions: buffers, flags, an override that is entered.

The `bindings()` of such a patch returns a Bindings, with a Resource for each thing that it holds:

    stash = Stash(options)
    return Bindings({TARGET: functools.partial(_forward, stash=stash)}, Resource(stash.held, stash.release))

status() then names what is held (``report[id].holds``). revert() ends it, and so does an apply() without the patch or
with other options of it. State needs no entry when it ends with a call or belongs to what the call returns. State that
only the functions of `bindings()` refer to needs none either: the engine drops these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

__all__ = ["Bindings", "Resource"]


class Resource(NamedTuple):
    """One thing that a patch holds. The engine calls both functions at any time, from any thread, and more than once.

    tells: says in a few words what is held at this moment, with its size. "" if nothing is held.
    release: ends as much of it as can end now. None if only the user can end it. The header of the patch then says
        so, and status() goes on naming it.
    begin: called with each module that the key `before` of patch.yaml names, just before its code runs, also for a
        reload. It may ask finders, and imports nothing. The patch may have been dropped meanwhile.
    """

    tells: Callable[[], str]
    release: Callable[[], None] | None = None
    begin: Callable[[ModuleType], None] | None = None


class Bindings(dict[str, Callable[[Any], Any]]):
    """The factories of a patch by target, and what the patch holds."""

    def __init__(self, factories: Mapping[str, Callable[[Any], Any]], *resources: Resource) -> None:
        super().__init__(factories)
        self.resources = resources
