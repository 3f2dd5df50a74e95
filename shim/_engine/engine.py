"""The engine: one object that holds all state of shim in a process, and keeps the process in step with the plan.

The invariant: a transaction (apply, revert, the begin and end of a with-block, an import) is one thing. It is prepared
on copies, where every error and interrupt leaves the process as it was. Then names and records, `plan` included, are
written in one step of the interpreter (switch.py). The consequences of the plan are brought in step after it, or by the
next call if the transaction is interrupted there (`recover`).

- Every transaction goes through one loop, `transact`. The path of apply() is `switch_to`, `transact` and `_write` here,
  then Binder.commit, which lets a Draft compute the writes, and Switch.perform, which makes them.
- A call of shim from inside of a transaction of the same thread (a factory, a signal handler, a finalizer) reads
  what was in force before it, and is refused any change. The end of a with-block waits until the transaction is over,
  and so does what an import has to be bound.
- A forked process has the state before or after a transaction of another thread, and a new lock.

Whenever `lock` is free:
- `plan` is the plan in force, conflicts included; None if nothing is wanted.
- The binder's chains match the plan in all modules that have run to the end, without the patches in `failed`. Modules
  in `watch.late` are the exception; catch_up() brings them up to date.
- `watch` follows from the plan. The import hook is installed if there is a module to watch.
- The plan is for the files that the loaded modules ran, as far as was checked: see tied.py.
- `factories` has factories of the plan only. Everything else that patches hold has ended, or is reported until it can
  end.

`lock` guards every field, and is held while a transaction is prepared and written. No code imports, logs or asks
finders under `lock`: another thread may hold an import lock, or the lock of a logging handler, while it waits for
`lock`. Messages wait in `deferred` instead, and `transact` lets go of the lock to import patch modules. The
modules that take the lock are listed in within.py.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext, suppress
from types import ModuleType
from typing import Any, NamedTuple

from shim._engine.aliases import namespace_of
from shim._engine.binder import Binder
from shim._engine.chain import Imported
from shim._engine.checked import Checked
from shim._engine.conflicts import require_none, warnings_for, with_conflicts
from shim._engine.contexts import Block, Context, Contexts
from shim._engine.deferred_log import DeferredLog, short_of
from shim._engine.ending import is_ending
from shim._engine.exception_notes import ExceptionNotes
from shim._engine.factories import Factories
from shim._engine.import_hook import ImportHook
from shim._engine.imports import Imports
from shim._engine.modules import locked_modules
from shim._engine.records import Findings
from shim._engine.switch import Write
from shim._engine.tied import Renewal
from shim._engine.watch import Watch
from shim._engine.within import is_owned, is_within, refused_within
from shim._errors import BindError
from shim._planning.plan import Plan
from shim._planning.requirements import enforce
from shim._planning.second_call import changed_by

__all__ = ["ENGINE", "Engine"]


class _Goal(NamedTuple):
    """What a transaction is to bring into force, as of the moment when it was asked.

    failed: patches that are left out, with the reason why each could not be bound.    blocks: the with-blocks then.
    called: whether a call asks for this plan: its demands are checked, and if one patch fails, nothing is changed.
        Else a patch that fails is left out as a whole, and the others are bound.
    """

    plan: Plan | None
    failed: dict[str, str]
    blocks: tuple[Block, ...]
    called: bool = False

    @property
    def environment(self) -> object:
        """What the plan was made for: the same object with and without conflicts, and another for each call."""
        return None if self.plan is None else self.plan.environment


class Engine:
    """Brings the process to a plan, keeps it there while modules are imported, and knows all that reports need.

    `_api` uses `plan`, `find_conflicts`, `switch_to`, `release`, `catch_up`, `warn` and `renewal`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.deferred = DeferredLog(self.is_within)
        self.binder = Binder()
        self.factories = Factories(lambda: self.lock, self.deferred)
        self.contexts = Contexts()
        self.checked = Checked()
        self.plan: Plan | None = None
        self.last: Plan | None = None  # the last plan that was wanted
        self.switches = 0  # how many times a call set out to change the plan
        self.announced = False  # whether this process has said the line of announcement.py
        self.failed: dict[str, str] = {}  # patch -> why it could not be bound under this plan
        self.imports = Imports(self)
        self.watch = Watch(ImportHook(self.imports.wants, self.imports.before, self.imports.after))
        self.renewal = Renewal(self)
        self.notes = ExceptionNotes(lambda: self.plan)

    # One at a time

    def is_within(self) -> bool:
        """Whether the call that asks comes from inside of a transaction of this thread."""
        return is_within(self.lock)

    def after_fork(self) -> None:
        """In a forked process: the other threads are gone, with what they held, and their transactions never began."""
        if not is_owned(self.lock):
            self.lock = threading.RLock()
        here = threading.get_ident()
        self.contexts.keep_thread(here)
        self.watch.hook.keep_thread(here)
        self.watch.orphaned = frozenset(locked_modules())

    def _recover(self) -> None:
        """Bring in step what an interrupt has left behind. The caller holds the lock."""
        self.binder.recover()
        self.imports.abandon_failed()

    # Calls that change the plan

    def switch_to(self, wanted: Plan | None, context: Context | None = None, instead: Plan | None = None) -> None:
        """Make `wanted` the plan in force (None: nothing is wanted). After an error the earlier plan stays in force.

        context: the with-block that the plan belongs to, until `release`.
        instead: the plan that was made anew. Nothing is done if another plan has come into force.
        """
        if wanted is None and is_ending():
            return
        if self.is_within():
            raise refused_within("revert" if wanted is None else "apply" if context is None else "patched")
        before: Plan | None = None

        def goal() -> _Goal | None:
            nonlocal before
            before = self.plan
            if instead is not None and (before is None or before.environment is not instead.environment):
                return None
            return _Goal(wanted, {}, self._blocks_with(wanted, context, instead), called=True)

        try:
            if wanted is not None:
                self.watch.wait_for(wanted, self.binder.loaded)
                self.warn_patch(warnings_for(wanted))
                enforce(wanted)
            self.transact(goal)
            if context is None and wanted is not None and before is not None:
                self._warn_of_changes(before, wanted)
            self._do_what_waited()
        finally:
            self._finish()

    def _blocks_with(self, wanted: Plan | None, context: Context | None, instead: Plan | None) -> tuple[Block, ...]:
        """The open with-blocks once `wanted` is in force. OptionError for a call that they do not allow."""
        if instead is not None and wanted is not None:
            return self.contexts.renewed(instead, wanted)
        if context is not None and wanted is not None:
            return self.contexts.entered(context, wanted, self.plan)
        self.contexts.refuse_from_outside("revert" if wanted is None else "apply")
        return self.contexts.open

    def _warn_of_changes(self, before: Plan, wanted: Plan) -> None:
        """Warn if apply() has taken what another call had asked for. A with-block gives it back, and is silent."""
        text = changed_by(wanted, before)
        if text:
            self.warn([short_of(text)])

    def release(self, context: Context) -> None:
        """End a with-block: its earlier plan is in force again, unless another block with the same plan is open.

        Requirements and the lock file are not checked again: the earlier plan met them when it was applied. Within a
        transaction of this thread, as in a finalizer, the block ends once that is over.
        """
        context.over = True
        if not is_ending() and not self.is_within():
            self._end_blocks()

    def _end_blocks(self) -> None:
        """End the with-blocks that are over, the newest first."""
        renewed = False
        try:
            while (block := self.contexts.over()) is not None:
                if not renewed and block.beneath is not None and self.renewal.is_renewed(block.beneath):
                    renewed = True
                    continue
                if block.beneath is not None:
                    self.watch.wait_for(block.beneath, self.binder.loaded)
                self.transact(functools.partial(self._without, block))
        finally:
            self._finish()

    def _without(self, block: Block) -> _Goal:
        """The plan that comes into force at the end of a block, which another thread may have ended meanwhile."""
        if block not in self.contexts.open:
            return self._in_force()
        blocks, restores = self.contexts.without(block)
        return _Goal(block.beneath, {}, blocks) if restores else self._in_force()._replace(blocks=blocks)

    def _finish(self) -> None:
        """Clean up after switch_to() and release(), also after an error: end what patches hold, and log."""
        with self.lock:
            self.watch.tidy()
            self.factories.keep_only(self.plan, self.failed)
            self.notes.follow(self.plan is not None)
        self.factories.release_dropped()
        self.deferred.flush()

    # Work that comes with imports, or had to wait

    def begin_before(self, module: ModuleType) -> None:
        """Begin what patches hold from before the code of a module on: see Resource.begin. Called without the lock."""
        plan, but, name = self.plan, self.failed, namespace_of(module)["__name__"]
        if plan is None:
            return
        if not self.is_within():
            with suppress(BindError):  # the transaction after the code fails in the same way, and tells
                self.factories.load(plan, but, lambda found: found == name)
        self.factories.begin(plan, but, name, module)

    def bind_imported(self, imported: Imported) -> None:
        """Bind the targets of a module that has just run. `imported`: see Binder.commit."""
        self.transact(self._in_force, imported)
        self._do_what_waited()

    def try_again(self, module: str) -> None:
        """Bind patches with targets in this module although they have failed: each import of a target tries them."""
        if self.plan is not None and self.failed:
            plan = self.plan
            self.failed = {id: why for id, why in self.failed.items() if module not in plan[id].modules}

    def catch_up(self) -> None:
        """Do the work that had to wait, unless this call comes from inside of a transaction.

        Bind targets in modules that were half imported at apply() or came past the hook. Look for aliases in modules
        that were half imported at the last search. Bind targets that a foreign object has left. End blocks that are
        over. Make the plan anew if modules are loaded that it was not made for (Renewal.keep_tied, also for errors).
        """
        if self.is_within():
            return
        self.renewal.keep_tied()
        try:
            self.do_late_work()
        finally:
            self.factories.release_dropped()
            self.deferred.flush()

    def _do_what_waited(self) -> None:
        """Do what could not be done within the transaction that has just ended."""
        if self.imports.ran_within or self.contexts.over() is not None or self.watch.ready(self.binder.loaded):
            self.do_late_work()

    def do_late_work(self) -> None:
        """See catch_up."""
        if self.contexts.over() is not None:
            self._end_blocks()
        with self.lock:
            self._recover()
            self.imports.renew_ran_within()
        self.transact(self._in_force)

    def _in_force(self) -> _Goal:
        return _Goal(self.plan, self.failed, self.contexts.open)

    # Transactions

    def transact(self, goal: Callable[[], _Goal | None], imported: Imported | None = None) -> None:
        """Bring the process to a goal, in rounds. BindError names a failed patch.

        Each round takes the lock and asks for the goal of this moment (None: there is nothing to do). It ends in one of
        three ways:
        - Patch modules are missing. They are imported without the lock, and the next round begins anew: another thread
          may have changed the plan, or have imported a further target.
        - A patch cannot be bound, and nothing is written. The next round leaves the patch out; see _Goal.called.
        - Everything is there, and is written in one step.

        imported: see Binder.commit.
        """
        first: BindError | None = None
        fresh: dict[str, str] = {}  # patches that have failed in an earlier round, under the plan for `environment`
        waiting: set[str] = set()  # patches whose modules are being imported further down on this thread's stack
        asked, environment, loads = None, None, False
        while True:
            try:
                with self.lock:
                    self._recover()
                    asked = goal()
                    if asked is None:
                        return
                    if asked.environment is not environment:
                        fresh, environment = {}, asked.environment
                    asked = asked._replace(failed={**asked.failed, **fresh})
                    but = {*asked.failed, *waiting}
                    plan, findings = self._with_conflicts(asked, but)
                    if findings is not None:
                        if asked.called or imported or loads or fresh or self._differs(plan, asked) or self._is_due():
                            self._write(asked._replace(plan=plan), findings, imported)
                        else:
                            self.binder.found = findings
                        break
                    if plan is None:
                        return
                    if plan is not self.plan:
                        self.watch.add(self.watch.of(plan))
                loads = True
                waiting |= self.factories.load(plan, but, self.binder.loaded)
            except BindError as error:
                if error.patch is None or asked is None:
                    raise
                if asked.called or error.patch in asked.failed:
                    raise _failure(error, asked.plan) from error
                # The whole patch is unbound, also from targets that were bound at earlier imports.
                fresh[error.patch] = str(error)
                first = first or error
        if first is not None:
            raise _failure(first, plan) from first

    def _with_conflicts(self, asked: _Goal, but: Collection[str]) -> tuple[Plan | None, Findings | None]:
        """The plan with its conflicts, and what was found about other people's objects; None if factories are missing.

        Plans get conflicts here only, apart from find_conflicts().
        """
        plan = asked.plan
        if plan is None:
            return None, self.binder.looking().found.forgotten(self.binder.chains)
        if self._misses(plan, but):
            return plan, None
        found, findings = with_conflicts(plan, self.binder)
        if found is not plan:
            if self._misses(found, but):  # a conflict has ended
                return found, None
            for finding in warnings_for(found):
                self.deferred.warn_patch(*finding)
            if asked.called:
                enforce(found)
        return found, findings

    def _misses(self, plan: Plan, but: Collection[str]) -> bool:
        return any(True for _ in self.factories.missing(plan, but, functools.cache(self.binder.loaded)))

    def _differs(self, plan: Plan | None, asked: _Goal) -> bool:
        """Whether another plan comes into force, or a with-block ends."""
        return plan is not self.plan or asked.blocks is not self.contexts.open

    def _is_due(self) -> bool:
        """Whether work has waited that the plan does not show: late modules have run, or others have replaced names."""
        places, modules = self.binder.places, self.binder.modules
        ready = self.watch.take_ready(self.binder.loaded)
        return bool(ready or modules.overdue() or places.given_back() or places.has_replaced())

    def _write(self, asked: _Goal, findings: Findings, imported: Imported | None) -> None:
        """Bind the layers of a plan whose factories are loaded, and make it the plan in force, in one step."""
        plan, failed = asked.plan, asked.failed
        self.switches += asked.called
        if plan is self.plan:  # as at most imports
            also = [self.watch.still_late(self.binder.loaded)]
        else:
            modules = self.watch.of(plan)
            also = [*self.watch.writes(modules, self.binder.loaded)]
            self.watch.add(modules)
        also += [
            Write(self, "plan", self.plan, plan),
            Write(self, "last", self.last, plan or self.last),
            Write(self, "failed", self.failed, failed),
            Write(self, "checked", self.checked, Checked() if plan is None else self.checked),
            Write(self.contexts, "open", self.contexts.open, asked.blocks),
        ]
        layers = self.factories.layers(plan, failed)
        with self.deferred.deferring() if layers else nullcontext():
            replaced = self.binder.commit(layers, imported, also, findings)
        # Another thread may have imported a module between the search for conflicts and the commit.
        self.watch.late |= self.binder.missed
        self.factories.keep_only(plan, failed)
        for item in replaced:
            if self.binder.effect_of(item) == "replaced":
                self.deferred.warn(f"{item} since shim bound it; it is left alone")
        if imported is not None and plan is not None:
            require_none(plan, imported[0])

    # For others to ask

    def find_conflicts(self, plan: Plan) -> Plan:
        """The plan with the conflicts that switch_to() would find now."""
        with self.lock:
            return with_conflicts(plan, self.binder)[0]

    def warn(self, texts: Iterable[str]) -> None:
        """Log each text as a warning, once in the process."""
        with self.lock:
            self.deferred.warn_once(texts)
        self.deferred.flush()

    def warn_patch(self, findings: Iterable[tuple[str, str, str, str]]) -> None:
        """Log each warning about a patch once in the process: see DeferredLog.warn_patch."""
        with self.lock:
            for finding in findings:
                self.deferred.warn_patch(*finding)
        self.deferred.flush()

    def beneath(self, value: Any) -> Any:
        """The object beneath `value` if `value` is a wrapper of shim's, else `value`."""
        with self.lock:
            return self.binder.wrappers.beneath(value)


def _failure(error: BindError, plan: Plan | None) -> BindError:
    releases = () if plan is None else plan.environment.installed.values()
    release = ", ".join(f"{i.distribution} {i.raw}" for i in releases)
    return BindError(
        f"{error.patch} failed and was rolled back as a whole: {error} (on {release}). Remedy: run without it "
        f"(MEGATRON_SHIM_EXCLUDE={error.patch}) and report it with the output of `shim doctor`.",
        error.patch,
    )


# The engine of this process. It holds all of shim's state, except the entered overrides of shim.config_override, which
# works without apply() (shim._config_override.recompute).
ENGINE = Engine()


def _after_fork() -> None:
    ENGINE.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
