"""The one module that holds global state: the lock, the plan, the binder, the hook, and how they are kept in step."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

from shim._engine.aliases import is_initialising, namespace_of, unwrap
from shim._engine.binder import Binder
from shim._engine.chain import LAZY, MISSING, Imported, Layer
from shim._engine.contexts import Context, Contexts
from shim._engine.foreign import describe, foreign_on
from shim._engine.import_hook import ImportHook
from shim._engine.stand_ins import StandIns
from shim._engine.variables import Variables
from shim._errors import BindError, NotMetError, ShimError
from shim._kept import Kept
from shim._planning.plan import Decision, Plan
from shim._planning.requirements import enforce
from shim._releases.fingerprint import ABSENT, split_target
from shim._releases.sources import Sources

__all__ = ["STATE", "adopt", "catch_up", "held", "release", "with_conflicts"]

log = logging.getLogger("shim")

_SAID_LIMIT = 1000


# What factories depend on: patch, variant, options and targets.
_Content = tuple[str, "str | None", str, tuple[str, ...]]


class _Entry(NamedTuple):
    """What a patch keeps, and the factories with which it was made."""

    content: _Content
    factories: Mapping[str, Any]
    kept: Kept


class _Loading(threading.local):
    """Whether this thread is importing patch modules, whose own imports are no occasion to import others of them."""

    active = False


class _State:
    """All that shim remembers in a process. Whoever reads or changes it holds `lock`, and neither imports nor logs
    meanwhile: another thread may hold an import lock, or one of a logging handler, and wait for this one."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.binder = Binder()
        self.plan: Plan | None = None  # None: nothing is wanted
        self.last: Plan | None = None  # the last one that was wanted
        self.patches: frozenset[str] = frozenset()  # patch modules of the plan, and the packages they are in
        self.modules: frozenset[str] = frozenset()  # modules of the targets of the plan
        self.watched: frozenset[str] = frozenset()  # those, and modules that may run with a stand-in for a package
        self.late: frozenset[str] = frozenset()  # those of `modules` that no commit has seen loaded yet
        self.adoptions = 0  # how often a plan was made the current one
        self.contexts = Contexts()
        self.factories: dict[_Content, Mapping[str, Any]] = {}
        self.kept: list[_Entry] = []  # of the patches in `factories`, and what could not end with theirs yet
        self.failed: dict[str, str] = {}
        self.said: set[str] = set()
        self.unsaid: deque[tuple[int, str]] = deque()  # what waits to be logged until the lock is free
        self.sources: Sources | None = None  # of the last plan that was made, for the next one
        self.variables = Variables()
        self.stand_ins = StandIns()
        self.loading = _Loading()
        self.hook = ImportHook(self.wants, self.before_import, self.after_import)

    def adjust(self, plan: Plan | None) -> None:
        self.plan = plan
        self.last = plan or self.last
        self.modules = frozenset() if plan is None else frozenset(_target_modules(plan))
        self.patches = frozenset() if plan is None else frozenset(_patch_modules(plan))
        self.stand_ins.settle(plan)
        self.watched = self.modules.union(self.stand_ins.modules)
        self.late = frozenset(name for name in self.modules if self.binder.loaded(name) is None)
        self.warn_once(self.variables.settle(plan))

    def warn_once(self, texts: Iterable[str]) -> None:
        """Have `speak` say what was not said before."""
        for text in texts:
            if text not in self.said and len(self.said) < _SAID_LIMIT:
                self.said.add(text)
                self.unsaid.append((logging.WARNING, text))

    def speak(self) -> None:
        """Log what waits; called without the lock, and not while importlib asks for a module."""
        while True:
            try:
                level, text = self.unsaid.popleft()
            except IndexError:
                return
            log.log(level, "%s", text)

    @contextmanager
    def silence(self) -> Iterator[None]:
        """What this thread logs meanwhile waits for `speak`: factories of patches log, too, and know no lock."""
        thread = threading.get_ident()

        def keep(record: logging.LogRecord) -> bool:
            mine = threading.get_ident() == thread
            if mine:
                self.unsaid.append((record.levelno, record.getMessage()))
            return not mine

        log.addFilter(keep)
        try:
            yield
        finally:
            log.removeFilter(keep)

    # What the import hook calls

    def wants(self, module: str) -> bool:
        # Asked for every import of the process, so without the lock, and with no more work than this.
        # Not while a patch module is being found: catching up may import that very module, and load it twice.
        if sys.modules.keys().isdisjoint(self.late) or self.loading.active or module in self.patches:
            return module in self.watched
        # What cannot be done here is done when this module has run.
        return not catch_up_here(self) or bool(self.unsaid) or module in self.watched

    def before_import(self, module: ModuleType) -> None:
        missing = self.stand_ins.missing(namespace_of(module)["__name__"])
        with self.lock:
            self.stand_ins.give(module, missing)

    def after_import(self, module: ModuleType, meanwhile: Sequence[str]) -> None:
        name = namespace_of(module)["__name__"]
        with self.lock:
            self.binder.executed.add(name)
            self.late -= {name}
            self.binder.renew(module)
            for id in [id for id in self.failed if self.plan and name in _modules_of(self.plan[id])]:
                del self.failed[id]  # each import of a target tries again, and raises again
        try:
            _settle(self, (name, [name, *meanwhile]))
        except BaseException:
            with self.lock:
                self.binder.executed.discard(name)
                if self.binder.loaded(name) is None:  # it is not being reloaded, so it leaves sys.modules
                    self.binder.abandon(name)
            raise
        finally:
            with self.lock:
                self.binder.executed.discard(name)
            self.speak()


STATE = _State()


def _target_modules(plan: Plan) -> set[str]:
    """Modules whose import concerns the plan: what is to be bound there, or what is required and cannot be."""
    required = {id for id in plan.options.require if plan[id].action == "conflict"}
    concerned = [d for d in plan.decisions.values() if d.wanted or d.id in required]
    return {split_target(target)[0] for d in concerned for target in d.targets}


def _patch_modules(plan: Plan) -> Iterator[str]:
    for entry in plan.matrix.patches.values():
        parts = entry.module.split(".")
        yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _modules_of(decision: Decision) -> set[str]:
    return {split_target(target)[0] for target in decision.targets}


def _content(decision: Decision) -> _Content:
    return decision.id, decision.variant, repr(sorted(decision.options.items())), decision.targets


# Binding


def _without_factories(state: _State, plan: Plan) -> Iterator[Decision]:
    """The patches that are needed now and whose modules have not been asked for their factories."""
    for decision in plan.decisions.values():
        if not decision.wanted or _content(decision) in state.factories or decision.id in state.failed:
            continue
        if any(state.binder.loaded(module) for module in _modules_of(decision)):
            yield decision


def _load_factories(state: _State, plan: Plan) -> None:
    """Import the patch modules that are needed now. Called without the lock: an import may wait for another thread."""
    for decision in _without_factories(state, plan):
        content = _content(decision)
        entry = plan.matrix.patches[decision.id]
        outer, state.loading.active = state.loading.active, True
        try:
            module = importlib.import_module(entry.module)
            if is_initialising(module):
                # It imports a target itself, and this is that import: whoever imports the patch binds it in the end.
                continue
            made = module.bindings(decision.variant, dict(decision.options))
            factories = dict(made)
        except Exception as error:
            what = f"{decision.id} cannot be loaded from {entry.module}: {type(error).__name__}: {error}"
            raise BindError(what, decision.id) from error
        finally:
            state.loading.active = outer
        if set(factories) != set(decision.targets):
            odd = ", ".join(sorted(set(factories) ^ set(decision.targets)))
            what = f"matrix and {entry.module} disagree about the targets of {decision.variant}: {odd}"
            raise BindError(f"{decision.id}: {what}", decision.id)
        with state.lock:
            state.factories[content] = factories
            state.kept += [_Entry(content, factories, kept) for kept in getattr(made, "kept", ())]


def _layers(state: _State, plan: Plan) -> dict[str, tuple[Layer, ...]]:
    wanted: dict[str, tuple[Layer, ...]] = {}
    for decision in plan.decisions.values():
        content = _content(decision)
        factories = state.factories.get(content)
        if not decision.wanted or decision.id in state.failed or factories is None:
            continue
        for target in decision.targets:
            flags = {"alone": target in decision.alone, "added": target in decision.added}
            layer = Layer(decision.id, target, factories[target], content=content, **flags)
            wanted[target] = (*wanted.get(target, ()), layer)
    return wanted


def _conflict(state: _State, decision: Decision, plan: Plan) -> str:
    """Whose object sits on a target of a patch that is about to be bound; "" where nobody's does."""
    binder = state.binder
    for target in decision.targets:
        if target in binder.chains or binder.loaded(split_target(target)[0]) is None:
            continue
        try:
            value = binder.resolve(target, target in decision.added)[2]
        except BindError as error:
            return str(error)
        if value is MISSING:
            continue
        if decision.fingerprints.get(target) == ABSENT:
            return f"{target}, which the release lacks, holds {describe(unwrap(value))}"
        variant = plan.matrix.patches[decision.id].variants[decision.variant or ""]
        body = variant.inherits(target) or target
        found = foreign_on(body, unwrap(binder.beneath(value)), plan.environment.sources)
        if found:
            return f"{target} holds {found}"
    return ""


def with_conflicts(state: _State, plan: Plan) -> Plan:
    """The plan with every patch turned to ``conflict`` whose target somebody else holds, and back where nobody does."""
    decisions = {id: decision.displaced or decision for id, decision in plan.decisions.items()}
    for id, decision in list(decisions.items()):
        found = _conflict(state, decision, plan) if decision.wanted else ""
        if found:
            remedy = f"call shim.apply() before the other patch is made, or exclude {id}"
            decisions[id] = replace(decision, action="conflict", reason=found, remedy=remedy, displaced=decision)
    return plan if decisions == plan.decisions else replace(plan, decisions=decisions)


def _end_conflicts(state: _State) -> None:
    """Want again what a foreign object is gone from, before factories are loaded for what is wanted."""
    plan = state.plan
    if plan is not None and any(decision.displaced for decision in plan.decisions.values()):
        current = with_conflicts(state, plan)
        if current is not plan:
            state.adjust(current)


def _settle(state: _State, imported: Imported | None = None) -> None:
    """Bring the process to the current plan as far as its modules are loaded; BindError names the failing patch.

    Loops because the patch modules are imported without the lock, and the plan may change meanwhile, and because the
    patches that do not fail are bound all the same. `imported`: see Binder.commit.
    """
    first: BindError | None = None
    while True:
        with state.lock:
            _end_conflicts(state)
            plan = state.plan
            # Asked before anything is looked at: what another thread imports meanwhile is still to be bound.
            loaded = {name for name in state.modules if state.binder.loaded(name) is not None}
        try:
            if plan is not None:
                _load_factories(state, plan)
            with state.lock:
                if plan is not state.plan:
                    continue
                if plan is not None:
                    plan = with_conflicts(state, plan)
                    state.adjust(plan)
                    _say(state, plan)
                with state.silence():
                    for item in state.binder.commit(_layers(state, plan) if plan is not None else {}, imported):
                        log.warning("%s since shim bound it; it is left alone", item)
                # Drop the factories of patches that are no longer applied, and what those hold.
                wanted = [] if plan is None else [d for d in plan.decisions.values() if d.wanted]
                needed = {_content(decision) for decision in wanted if decision.id not in state.failed}
                state.factories = {content: f for content, f in state.factories.items() if content in needed}
                state.late = state.modules - loaded
                if plan is not None:
                    _enforce_required(plan, imported)
            break
        except BindError as error:
            if error.patch is None or error.patch in state.failed:
                raise
            # The whole patch is taken off, also where earlier imports had bound it.
            with state.lock:
                state.failed[error.patch] = str(error)
            first = first or error
    if first is not None:
        releases = () if plan is None else plan.environment.installed.values()
        release = ", ".join(f"{i.distribution} {i.raw}" for i in releases)
        raise BindError(
            f"{first.patch} failed and was rolled back as a whole: {first} (on {release}). Remedy: run without it "
            f"(MEGATRON_SHIM_EXCLUDE={first.patch}) and report it with the output of `shim doctor`.",
            first.patch,
        ) from first


def _end_kept(state: _State) -> None:
    """End what patches keep that are no longer applied. Called without the lock: a patch may have locks of its own.

    What cannot end yet, because something still uses it, is asked again at the next occasion.
    """
    with state.lock:
        over = [entry for entry in state.kept if state.factories.get(entry.content) is not entry.factories]
    for entry in over:
        if entry.kept.release is not None:
            try:
                entry.kept.release()
            except Exception as error:  # noqa: BLE001 - one patch must not keep what others hold from being freed
                text = f"{entry.content[0]} could not end what it keeps: {type(error).__name__}: {error}"
                state.warn_once([text])
    ended = {id(entry) for entry in over if not _told(entry.kept)}
    with state.lock:
        state.kept = [entry for entry in state.kept if id(entry) not in ended]


def _told(kept: Kept) -> str:
    try:
        return kept.tells()
    except Exception as error:  # noqa: BLE001 - status() tells of the error in the place of what is kept
        return f"something that cannot be told: {type(error).__name__}: {error}"


def held(state: _State) -> dict[str, tuple[str, ...]]:
    """By patch id what it keeps in the process at this moment, in words. Called without the lock."""
    found: dict[str, list[str]] = {}
    with state.lock:
        kept = list(state.kept)
        for id, text in state.variables.held():
            found.setdefault(id, []).append(text)
    for entry in kept:
        text = _told(entry.kept)
        if text:
            found.setdefault(entry.content[0], []).append(text)
    return {id: tuple(texts) for id, texts in found.items()}


def _enforce_required(plan: Plan, imported: Imported | None) -> None:
    for id in plan.options.require:
        decision = plan[id]
        if decision.action == "conflict" and (imported is None or imported[0] in _modules_of(decision)):
            raise NotMetError(f"required, but {id} is in conflict: {decision.reason}. Remedy: {decision.remedy}.")


def _stays_wrong(plan: Plan, id: str) -> str:
    entry = plan.matrix.patches[id]
    return f"What stays wrong: {entry.without}. " if entry.without else f"What is missing: {entry.summary}. "


def _say(state: _State, plan: Plan) -> None:
    """Warn once, as soon as the lock is free, about every correctness patch that cannot be applied."""
    state.warn_once(
        f"{decision.id} is not applied ({decision.action}): {decision.reason}. {_stays_wrong(plan, decision.id)}"
        f"Remedy: {decision.remedy}."
        for decision in plan.decisions.values()
        if decision.kind == "correctness" and decision.action in ("drifted", "conflict")
    )


def _is_lazy(module: object) -> bool:
    return issubclass(type(module), LAZY)


def _half_imported(plan: Plan) -> set[str]:
    names = {name for name in _target_modules(plan) if name in sys.modules and STATE.binder.loaded(name) is None}
    return {name for name in names if not _is_lazy(sys.modules.get(name))}


def _wait_for_imports(plan: Plan) -> None:
    """Wait for target modules that other threads are importing right now; called without the lock."""
    for name in _half_imported(plan):
        try:
            importlib.import_module(name)  # returns at once where it is this very thread that imports it
        except Exception as error:  # noqa: BLE001 - whoever imports it raises it; here the module just stays pending
            log.debug("the import of %s, which was under way, failed: %s", name, error)


def catch_up(state: _State) -> None:
    """Bind target modules that were half imported at apply(), or that came in past the hook, look for aliases in
    modules that were half imported when they were looked for, and bind what a foreign object is gone from."""
    try:
        _catch_up(state)
    finally:
        _end_kept(state)
        state.speak()


def _catch_up(state: _State) -> None:
    with state.lock:
        ready = {name for name in state.late if state.binder.loaded(name) is not None}
        state.late -= ready
        overdue = state.binder.overdue()
        plan = state.plan
        cleared = plan is not None and (state.binder.given_back() or with_conflicts(state, plan) is not plan)
    if ready or overdue or cleared:
        _settle(state)


def catch_up_here(state: _State) -> bool:
    """Catch up within the search for a module, if nothing has to be imported for it: importlib holds a lock of the
    whole process there, and whoever imports a patch module meanwhile waits for that one. Returns whether it could."""
    plan = state.plan
    if plan is not None and any(True for _ in _without_factories(state, plan)):
        return False
    _catch_up(state)
    return True


def _watch_imports(state: _State) -> None:
    if state.watched:
        state.hook.install()
    for name in state.watched:
        module = sys.modules.get(name)
        if module is not None and _is_lazy(module):
            state.hook.adopt_lazy(module)


def adopt(wanted: Plan | None, context: Context | None = None) -> None:
    """Make `wanted` the current plan (None: nothing is wanted); on any error the plan before it stays.

    context: the with-block that it is for, until `release`.
    """
    state = STATE
    if wanted is not None:
        _wait_for_imports(wanted)
        with state.lock:
            wanted = with_conflicts(state, wanted)
            _say(state, wanted)
        state.speak()
        enforce(wanted)
    before, failed, mine = state.plan, dict(state.failed), -1
    try:
        with state.lock:
            if context is None:
                state.contexts.refuse_from_outside("revert" if wanted is None else "apply")
            elif wanted is not None:
                state.contexts.enter(context, wanted, state.plan)
            before, failed = state.plan, dict(state.failed)
            mine = state.adoptions = state.adoptions + 1
            state.adjust(wanted)
            state.failed.clear()
            _watch_imports(state)
        _settle(state)
    except BaseException:
        with state.lock:
            if context is not None:
                state.contexts.leave(context)
            if state.adoptions == mine:  # no other thread has made another plan the current one meanwhile
                state.adjust(before)
                state.failed = failed
        try:
            _settle(state)
        except ShimError as error:
            log.warning("what was applied before could not be restored as a whole: %s", error)
        raise
    finally:
        with state.lock:
            if not state.watched:
                state.hook.remove()
        _end_kept(state)
        state.speak()


def release(context: Context) -> None:
    """End a with-block: what it found in force is so again, unless another block is open that asks for the same.

    Asks neither for the requirements nor for the lock of what it found anew: they were met when that was applied.
    """
    state = STATE
    if context.beneath is not None:
        _wait_for_imports(context.beneath)
    try:
        with state.lock:
            if not state.contexts.leave(context):
                return
            state.adoptions += 1
            state.adjust(context.beneath)
            state.failed.clear()
            _watch_imports(state)
        _settle(state)
    finally:
        with state.lock:
            if not state.watched:
                state.hook.remove()
        _end_kept(state)
        state.speak()
