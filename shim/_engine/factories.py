"""The factories of patches: imported when a target is loaded, dropped when no plan needs them, with what they keep."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from shim._engine.chain import Layer
from shim._engine.deferred_log import DeferredLog
from shim._engine.modules import is_initialising
from shim._errors import BindError
from shim._kept import Kept
from shim._planning.plan import Decision, Plan

__all__ = ["Factories"]

# What factories depend on: patch, variant, options and targets.
_Content = tuple[str, "str | None", str, tuple[str, ...]]


def _content(decision: Decision) -> _Content:
    return decision.id, decision.variant, repr(sorted(decision.options.items())), decision.targets


class _Entry(NamedTuple):
    """What a patch keeps, and the factories with which it was made."""

    content: _Content
    factories: Mapping[str, Any]
    kept: Kept


class _Loading(threading.local):
    """Whether this thread is importing patch modules, whose own imports are no occasion to import others of them."""

    active = False


class Factories:
    """Factories by what they depend on. Fields are read and changed under `lock`, the engine's.

    Patch modules are imported without the lock, because an import may wait for another thread. Two threads may so load
    the factories of one patch at once; those that come later hold, and what the others keep ends.
    """

    def __init__(self, lock: threading.RLock, deferred: DeferredLog) -> None:
        self._lock = lock
        self._log = deferred
        self._made: dict[_Content, Mapping[str, Any]] = {}
        self._kept: list[_Entry] = []  # of the patches in `_made`, and what could not end with theirs yet
        self._loading = _Loading()

    def __len__(self) -> int:
        return len(self._made)

    @property
    def loading(self) -> bool:
        return self._loading.active

    def missing(self, plan: Plan, but: Collection[str], loaded: Callable[[str], object]) -> Iterator[Decision]:
        """The patches that are needed now and whose modules have not been asked for their factories.

        but: ids that are not needed.    loaded: whether a module has run to the end.
        """
        for decision in plan.decisions.values():
            if not decision.wanted or _content(decision) in self._made or decision.id in but:
                continue
            if any(loaded(module) for module in decision.modules):
                yield decision

    def load(self, plan: Plan, but: Collection[str], loaded: Callable[[str], object]) -> set[str]:
        """Import the patch modules that are needed now; called without the lock. BindError names what fails.

        Returns ids of patches whose module imports a target itself, and this is that import: whoever imports the patch
        binds it in the end.
        """
        postponed = set()
        for decision in self.missing(plan, but, loaded):
            entry = plan.matrix.patches[decision.id]
            outer, self._loading.active = self._loading.active, True
            try:
                module = importlib.import_module(entry.module)
                if is_initialising(module):
                    postponed.add(decision.id)
                    continue
                made = module.bindings(decision.variant, dict(decision.options))
                factories = dict(made)
            except Exception as error:
                what = f"{decision.id} cannot be loaded from {entry.module}: {type(error).__name__}: {error}"
                raise BindError(what, decision.id) from error
            finally:
                self._loading.active = outer
            if set(factories) != set(decision.targets):
                odd = ", ".join(sorted(set(factories) ^ set(decision.targets)))
                what = f"matrix and {entry.module} disagree about the targets of {decision.variant}: {odd}"
                raise BindError(f"{decision.id}: {what}", decision.id)
            content = _content(decision)
            with self._lock:
                self._made[content] = factories
                self._kept += [_Entry(content, factories, kept) for kept in getattr(made, "kept", ())]
        return postponed

    def layers(self, plan: Plan | None, but: Collection[str]) -> dict[str, tuple[Layer, ...]]:
        """The layers of each target, innermost first: the order of the plan, which is that of the matrix."""
        wanted: dict[str, tuple[Layer, ...]] = {}
        for decision in () if plan is None else plan.decisions.values():
            content = _content(decision)
            factories = self._made.get(content)
            if not decision.wanted or decision.id in but or factories is None:
                continue
            for target in decision.targets:
                layer = Layer(decision.id, target, factories[target], decision.wiring, content)
                wanted[target] = (*wanted.get(target, ()), layer)
        return wanted

    def keep_only(self, plan: Plan | None, but: Collection[str]) -> None:
        """Drop the factories of patches that are not applied, so that what only they hold on to is freed."""
        wanted = [] if plan is None else [d for d in plan.decisions.values() if d.wanted and d.id not in but]
        needed = {_content(decision) for decision in wanted}
        self._made = {content: factories for content, factories in self._made.items() if content in needed}

    # What patches keep besides

    def end_kept(self) -> None:
        """End what patches keep whose factories were dropped. Called without the lock: a patch may have its own.

        What cannot end yet, because something still uses it, is asked again at the next occasion.
        """
        with self._lock:
            over = [entry for entry in self._kept if self._made.get(entry.content) is not entry.factories]
        for entry in over:
            if entry.kept.release is not None:
                try:
                    entry.kept.release()
                except Exception as error:  # noqa: BLE001 - one patch must not keep what others hold from being freed
                    text = f"{entry.content[0]} could not end what it keeps: {type(error).__name__}: {error}"
                    with self._lock:
                        self._log.warn_once([text])
        ended = {id(entry) for entry in over if not _told(entry.kept)}
        with self._lock:
            self._kept = [entry for entry in self._kept if id(entry) not in ended]

    def held(self) -> Iterator[tuple[str, str]]:
        """(patch, what it keeps at this moment, in words). Called without the lock."""
        with self._lock:
            kept = list(self._kept)
        for entry in kept:
            text = _told(entry.kept)
            if text:
                yield entry.content[0], text


def _told(kept: Kept) -> str:
    try:
        return kept.tells()
    except Exception as error:  # noqa: BLE001 - status() tells of the error in the place of what is kept
        return f"something that cannot be told: {type(error).__name__}: {error}"
