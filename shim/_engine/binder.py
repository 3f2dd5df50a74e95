"""Step 4, bind: bring ordered chains of patches onto targets, in transactions that are all or nothing."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence

from shim._engine.aliases import namespace_of
from shim._engine.chain import Imported, Layer, Replaced
from shim._engine.draft import Draft
from shim._engine.records import Findings, Records
from shim._engine.undo_list import UndoList, Write
from shim._errors import BindError
from shim._releases.fingerprint import split_target

__all__ = ["Binder"]

TRIES = 3  # of a transaction whose names other code writes meanwhile


class Binder(Records):
    """The records, and the transactions that change them and the process.

    Invariant: a transaction (`commit`) is all or nothing. It computes everything on a copy of the records and calls all
    factories first. Then an UndoList writes the names and the records.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unfinished: UndoList | None = None
        self.missed: frozenset[str] = frozenset()  # by the last commit, see Draft

    # Modules that run again, or whose import fails

    def renew(self, module: types.ModuleType) -> None:
        """Forget chains and places in a module whose code has run again, if it holds new objects there."""
        name = namespace_of(module)["__name__"]
        inside = f"{name}:"
        gone = {t for t, chain in self.chains.items() if t.startswith(inside) and not self._stands(chain)}
        if gone:
            self.chains = {target: chain for target, chain in self.chains.items() if target not in gone}
        if any(target.startswith(inside) for target in self.first):
            self.first = {t: first for t, first in self.first.items() if not t.startswith(inside)}
        self.places.forget_what_was_replaced_in(module)

    def abandon(self, name: str) -> None:
        """Unbind everything in a module whose import fails: the module is about to leave sys.modules."""
        self.commit({t: chain.layers for t, chain in self.chains.items() if split_target(t)[0] != name})

    # Transactions

    def commit(
        self,
        wanted: Mapping[str, tuple[Layer, ...]],
        imported: Imported | None = None,
        also: Sequence[Write] = (),
        found: Findings | None = None,
    ) -> list[Replaced]:
        """Bring the chains of all loaded targets to `wanted`, all or nothing. Returns the names found replaced.

        `wanted` maps targets to their layers, innermost first. A target that is not named loses all layers.
        `imported` limits the search for aliases of objects that a module has just defined. `also`: what is written in
        the same transaction. `found`: what was found about other people's objects for these layers. Everything new is
        built before, and every write is read back.
        """
        replaced = self._commit(wanted, imported, also, found or self.found)
        if self.modules.came_meanwhile():
            # Another thread has imported something since the search for aliases, and may hold what stood there before.
            replaced += self._commit(wanted, imported, (), self.found)
        return replaced

    def _commit(
        self,
        wanted: Mapping[str, tuple[Layer, ...]],
        imported: Imported | None,
        also: Sequence[Write],
        found: Findings,
    ) -> list[Replaced]:
        self.recover()
        for _ in range(TRIES):
            draft = Draft(self, found)
            draft.bring_to(wanted, imported)
            writes = [*draft.writes(), *also]
            if draft.places.is_up_to_date():
                break
        before = self.places.replaced
        self._perform(UndoList(writes))
        self.missed = frozenset(draft.missed)
        return [replaced for key, replaced in self.places.replaced.items() if before.get(key) is not replaced]

    def _perform(self, writes: UndoList) -> None:
        self._unfinished = writes
        try:
            writes.perform()
        except Exception as error:
            failing = writes.failing()
            self.recover()
            if failing is None:
                raise
            message = f"{failing.label} cannot be written: {type(error).__name__}: {error}"
            raise BindError(message, failing.patch) from error
        except BaseException:
            self.recover()
            raise
        failing = writes.failing()
        self.recover()
        if failing is not None:
            raise BindError(f"{failing.label} does not read back", failing.patch)

    def recover(self) -> None:
        """Take back writes of which one failed, or that a process was forked or a thread interrupted among."""
        if self._unfinished is not None:
            if self._unfinished.failing() is not None:
                self._unfinished.undo()
            self._unfinished = None
