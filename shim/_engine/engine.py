"""The engine: one object that holds all state of shim in a process, and keeps the process in step with the plan.

The invariant: a transaction (apply, revert, the begin and end of a with-block, an import) is all or nothing. It is
prepared on copies, where every error leaves the process as it was. Then names and records, `plan` included, are written
as one list, which is taken back whole if a write fails or is interrupted (UndoList).

- Every transaction goes through one loop, `transact`. The path of apply() is `switch_to`, `transact` and `_write` here,
  then Binder.commit, which lets a Draft compute the writes, and UndoList.perform, which makes them.
- A call of shim from inside of a transaction of the same thread (by a factory, say) reads what was in force before it,
  and is refused any change. The end of a with-block waits until the transaction is over, and so does what an import has
  to be bound.

Whenever `lock` is free:
- `plan` is the plan in force, conflicts included; None if nothing is wanted.
- The binder's chains match the plan in all modules that have run to the end, without the patches in `failed`. Modules
  in `watch.late` are the exception; catch_up() brings them up to date.
- `watch` follows from the plan. The import hook is installed if there is a module to watch.
- `factories` has factories of the plan only. Everything else that patches hold has ended, or is reported until it can
  end.

`lock` guards every field, and is held while a transaction is prepared and written. No code imports, logs or asks
finders under `lock`: another thread may hold an import lock, or the lock of a logging handler, while it waits for
`lock`. Messages wait in `deferred` instead, and `transact` lets go of the lock to import patch modules.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from types import ModuleType
from typing import Any, NamedTuple

from shim._engine.chains import Findings
from shim._engine.factories import Factories
from shim._engine.foreign import others_relied_on, with_conflicts
from shim._engine.import_hook import ImportHook, Watch, another_copy, concerned_by
from shim._engine.log import DeferredLog, ExceptionNotes, short_of
from shim._engine.names import Imported, Write, imports_no_megatron, namespace_of
from shim._engine.report import Checked, Report, require_none, warnings_for
from shim._engine.states import Claim, States, not_applied, read_report
from shim._engine.transactions import Binder
from shim._errors import BindError, NotMetError, OptionError
from shim._planning.plan import Plan, make_plan
from shim._planning.requirements import changed_by, enforce
from shim._record import replace
from shim._releases.detect import detect
from shim._releases.sources import Sources
from shim._threads import Block

__all__ = ["ENGINE", "Block", "Engine"]


# With-blocks
#
# Patches belong to the process. So blocks may nest, but blocks of different threads or tasks must ask for the same.


class _Open(NamedTuple):
    """An open block, its plan, and the plan that its end restores."""

    block: Block
    plan: Plan
    beneath: Plan | None


_REMEDY = "Remedy: let it end first, or use the same arguments in both, or call shim.apply() once for the whole process"


# The engine


class _Goal(NamedTuple):
    """What a transaction is to bring into force, as of the moment when it was asked.

    failed: patches that are left out, with the reason why each could not be bound.    blocks: the with-blocks then.
    called: whether a call asks for this plan: its demands are checked, and if one patch fails, nothing is changed.
        Else a patch that fails is left out as a whole, and the others are bound.
    """

    plan: Plan | None
    failed: dict[str, str]
    blocks: tuple[_Open, ...]
    called: bool = False

    @property
    def environment(self) -> object:
        """What the plan was made for: the same object with and without conflicts, and another for each call."""
        return None if self.plan is None else self.plan.environment


class Engine:
    """Brings the process to a plan, keeps it there while modules are imported, and knows all that reports need.

    `_api` uses its methods without an underscore, and `plan`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.deferred = DeferredLog(self.is_within)
        self.binder = Binder()
        self.factories = Factories(lambda: self.lock)
        self.blocks: tuple[_Open, ...] = ()  # the open with-blocks, the oldest first
        self.checked = Checked()
        self.plan: Plan | None = None
        self.last: Plan | None = None  # the last plan that was wanted
        self.switches = 0  # how many times a call set out to change the plan
        self.announced = False  # whether this process has said its line for the job (log.py)
        self.failed: dict[str, str] = {}  # patch -> why it could not be bound under this plan
        self.watch = Watch(ImportHook(self.wants, self.before_code, self.after_code))
        self.notes = ExceptionNotes(lambda: self.plan)
        self._sources: Sources | None = None  # what the last plan has read

    # One at a time

    def is_within(self) -> bool:
        """Whether the call that asks comes from inside of a transaction of this thread."""
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]

    def after_fork(self) -> None:
        """In a forked process: the other threads are gone, with what they held, and their transactions never began."""
        if not self.is_within():
            self.lock = threading.RLock()
            self.binder.recover()
        here = threading.get_ident()
        self.blocks = tuple(item for item in self.blocks if item.block.thread == here)
        self.watch.hook.keep_thread(here)

    # Calls that change the plan

    def switch_to(self, wanted: Plan | None, block: Block | None = None, instead: Plan | None = None) -> None:
        """Make `wanted` the plan in force (None: nothing is wanted). After an error the earlier plan stays in force.

        block: the with-block that the plan belongs to, until `release`.
        instead: the plan that was made anew. Nothing is done if another plan has come into force.
        """
        if wanted is None and _is_ending():
            return
        if self.is_within():
            what = "revert" if wanted is None else "apply" if block is None else "patched"
            raise OptionError(
                f"shim.{what}() was called within another call of shim, by a patch that is being bound. It has changed "
                "nothing. Remedy: call it when that call has returned."
            )
        before: Plan | None = None

        def goal() -> _Goal | None:
            nonlocal before
            before = self.plan
            if instead is not None and (before is None or before.environment is not instead.environment):
                return None
            return _Goal(
                wanted, {}, self.blocks if instead is not None else self._blocks_with(wanted, block), called=True
            )

        try:
            if wanted is not None:
                self.watch.wait_for(wanted, self.binder.loaded)
                self.warn_patch(warnings_for(wanted))
                enforce(wanted)
            self.transact(goal)
            if block is None and wanted is not None and before is not None:  # a with-block gives back what it takes
                changed = changed_by(wanted, before)
                self.warn([short_of(changed)] if changed else [])
            self._do_what_waited()
        finally:
            self._finish()

    def _blocks_with(self, wanted: Plan | None, block: Block | None) -> tuple[_Open, ...]:
        """The open with-blocks once `wanted` is in force. OptionError for a call that they do not allow."""
        inside = all(item.block.is_around() for item in self.blocks)
        if block is None or wanted is None:
            if not inside:  # the end of the block would undo the call
                what = "revert" if wanted is None else "apply"
                raise OptionError(
                    f"shim.{what}() cannot be called while another thread or task is within shim.patched(), because "
                    f"the end of that block would undo the call. {_REMEDY}."
                )
            return self.blocks
        if not inside and not all(_is_same(wanted, item.plan) for item in self.blocks):
            raise OptionError(
                "shim.patched() cannot begin, because another thread or task is within a shim.patched() with other "
                f"arguments, and patches hold for the whole process. {_REMEDY}."
            )
        return (*self.blocks, _Open(block, wanted, self.plan))

    def release(self, block: Block) -> None:
        """End a with-block: its earlier plan is in force again, unless another block with the same plan is open.

        Requirements and the lock file are not checked again: the earlier plan met them when it was applied. Within a
        transaction of this thread, as in a generator that is collected, the block ends once that is over.
        """
        block.over = True
        if not _is_ending() and not self.is_within():
            self._end_blocks()

    def _over(self) -> _Open | None:
        """A block that has ended and is still among the open ones, the newest first."""
        return next((item for item in reversed(self.blocks) if item.block.over), None)

    def _end_blocks(self) -> None:
        """End the with-blocks that are over, the newest first."""
        try:
            while (item := self._over()) is not None:
                if item.beneath is not None:
                    self.watch.wait_for(item.beneath, self.binder.loaded)
                    why = another_copy(item.beneath)
                    if why:  # the plan that returns does not fit this process any more
                        item = item._replace(beneath=self._made_anew(item.beneath, why))
                self.transact(functools.partial(self._without, item))
        finally:
            self._finish()

    def _without(self, ended: _Open) -> _Goal:
        """The plan that comes into force at the end of a block, which another thread may have ended meanwhile."""
        place = next((n for n, item in enumerate(self.blocks) if item.block is ended.block), None)
        if place is None:
            return self._in_force()
        older, newer = self.blocks[:place], self.blocks[place + 1 :]
        if not newer:
            return _Goal(ended.beneath, {}, older)
        # The plan returns with the end of the next block.
        return self._in_force()._replace(blocks=(*older, newer[0]._replace(beneath=ended.beneath), *newer[1:]))

    def _finish(self) -> None:
        """Clean up after switch_to() and release(), also after an error: end what patches hold, and log."""
        with self.lock:
            self.watch.tidy()
            self.factories.keep_only(self.plan, self.failed)
            self.notes.follow(self.plan is not None)
        self.warn(self.factories.release_dropped())

    # A plan that is for another copy of a package

    def new_sources(self, known: Callable[..., Any] | None) -> Sources:
        """Sources for a new plan. They reuse what the last plan's Sources have read. `known`: see Sources."""
        self._sources = Sources(before=self._sources, known=known)
        return self._sources

    def renew_plan(self) -> None:
        """Make the plan in force anew if a package is loaded from another place. Called without the lock.

        NotMetError if the new plan does not meet the demands of the call that the plan was made for. The plan stays
        in force then, and so does what is bound.
        """
        plan = self.plan
        why = "" if plan is None or self.is_within() else another_copy(plan)
        if plan is None or not why:
            return
        try:
            self.switch_to(self._made_anew(plan, why), instead=plan)
        except NotMetError as error:
            raise NotMetError(f"{why}. Until then: {error}") from error

    def _made_anew(self, plan: Plan, why: str) -> Plan:
        self.warn([f"{why}. The plan is made anew for it."])
        environment = detect(self.new_sources(plan.environment.sources.table))
        return replace(make_plan(environment, plan.matrix, plan.options, plan.losses), asked_by=plan.asked_by)

    # Imports: the import hook asks and tells

    def wants(self, module: str) -> bool:
        """Whether the import hook is to act on the import of a module."""
        # This runs for every import of the process, under a lock of importlib's. So it takes no lock and does no work:
        # after_code() does what is left when this module has run.
        if module in self.watch.watched:
            return True
        if imports_no_megatron(module) or not self.binder.ran(self.watch.late):
            return False
        # A target has come past the hook. While a patch module is imported, late work would import it a second time.
        return not (self.factories.loading or self.is_within())

    def before_code(self, module: ModuleType) -> None:
        """Just before the code of a module runs: begin what patches hold from there on (see Resource.begin)."""
        name = namespace_of(module)["__name__"]
        if name in self.watch.modules.packages and sys.modules.get(name) is module:
            self.renew_plan()
        plan, but = self.plan, self.failed
        if plan is None or name not in self.watch.modules.guests:
            return
        if not self.is_within():
            with suppress(BindError):  # the transaction after the code fails in the same way, and tells
                self.factories.load(plan, but, frozenset([name]))
        self.factories.begin(plan, but, name, module)

    def after_code(self, module: ModuleType, meanwhile: Callable[[], Sequence[str]]) -> None:
        """Just after the code of a module has run: bind its targets. See ImportHook for `meanwhile` and for errors."""
        name = namespace_of(module)["__name__"]
        if self.is_within():
            return  # it is late, and bound when the transaction is over
        with self.lock:
            self.binder.executed.add(name)
            self.watch.late -= {name}
            self.binder.renew(module)
            if self.plan is not None:  # patches with targets here may have failed: each import of a target tries them
                plan = self.plan
                self.failed = {id: why for id, why in self.failed.items() if name not in plan[id].modules}
        try:
            self.renew_plan()
            self.transact(self._in_force, (name, [name, *meanwhile()]))
            self._do_what_waited()
        except BaseException:
            with self.lock:
                self.binder.executed.discard(name)
                if self.binder.loaded(name) is None:  # not a reload: importlib removes the module from sys.modules
                    self.binder.abandon(name)
            raise
        finally:
            with self.lock:
                self.binder.executed.discard(name)
            self.deferred.flush()

    # Work that had to wait

    def catch_up(self) -> None:
        """Do the work that had to wait, unless this call comes from inside of a transaction.

        Bind targets in modules that were half imported at apply() or came past the hook. Look for aliases in modules
        that were half imported at the last search. Bind targets that a foreign object has left. End blocks that are
        over. Make the plan anew if it is for another copy (also for its errors, see renew_plan).
        """
        if self.is_within():
            return
        self.renew_plan()
        try:
            with self.lock:
                self.watch.tidy()  # other code may have taken the hook out of sys.meta_path
            self._do_late_work()
        finally:
            self.warn(self.factories.release_dropped())

    def _do_what_waited(self) -> None:
        """Do what could not be done within the transaction that has just ended."""
        if self._over() is not None or self.binder.ran(self.watch.late):
            self._do_late_work()

    def _do_late_work(self) -> None:
        if self._over() is not None:
            self._end_blocks()
        self.transact(self._in_force)

    def _in_force(self) -> _Goal:
        return _Goal(self.plan, self.failed, self.blocks)

    # Transactions

    def transact(self, goal: Callable[[], _Goal | None], imported: Imported | None = None) -> None:
        """Bring the process to a goal, in rounds. BindError names a failed patch.

        Each round takes the lock and asks for the goal of this moment (None: there is nothing to do). It ends in one of
        three ways:
        - Patch modules are missing. They are imported without the lock, and the next round begins anew: another thread
          may have changed the plan, or have imported a further target.
        - A patch cannot be bound, and nothing is written. The next round leaves the patch out; see _Goal.called.
        - Everything is there, and is written.

        imported: see Binder.commit.
        """
        first: BindError | None = None
        fresh: dict[str, str] = {}  # patches that have failed in an earlier round, under the plan for `environment`
        waiting: set[str] = set()  # patches whose modules are being imported further down on this thread's stack
        asked, environment = None, None
        while True:
            try:
                with self.lock:
                    asked = goal()
                    if asked is None:
                        return
                    if asked.environment is not environment:
                        fresh, environment = {}, asked.environment
                    asked = asked._replace(failed={**asked.failed, **fresh})
                    but = {*asked.failed, *waiting}
                    ran = frozenset() if asked.plan is None else self.binder.ran(asked.plan.awaited)
                    plan, findings = self._with_conflicts(asked, but, ran)
                    if findings is not None:
                        self._write(asked._replace(plan=plan), findings, imported)
                        break
                    if plan is None:
                        return
                    if plan is not self.plan:
                        self.watch.add(concerned_by(plan))
                waiting |= self.factories.load(plan, but, ran)
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

    def _with_conflicts(
        self, asked: _Goal, but: Collection[str], ran: frozenset[str]
    ) -> tuple[Plan | None, Findings | None]:
        """The plan with its conflicts, and what was found about other people's objects; None if factories are missing.

        ran: see with_conflicts(). Plans get conflicts here only, apart from find_conflicts().
        """
        plan = asked.plan
        if plan is None:
            return None, Findings()
        if any(self.factories.missing(plan, but, ran)):
            return plan, None
        found, findings = with_conflicts(plan, self.binder, ran)
        if found is not plan:
            if any(self.factories.missing(found, but, ran)):  # a conflict has ended
                return found, None
            for finding in warnings_for(found):
                self.deferred.warn_patch(*finding)
            if asked.called:
                enforce(found)
        return found, findings

    def _write(self, asked: _Goal, findings: Findings, imported: Imported | None) -> None:
        """Bind the layers of a plan whose factories are loaded, and make it the plan in force."""
        plan, failed = asked.plan, asked.failed
        same = plan is self.plan and failed == self.failed  # at most imports
        self.switches += asked.called
        modules = self.watch.modules
        if plan is not self.plan:
            modules = concerned_by(plan)
            self.watch.add(modules)
        late = modules.targets - findings.loaded
        also = [
            Write(self.watch, "modules", self.watch.modules, modules),
            Write(self.watch, "watched", self.watch.watched, frozenset().union(*modules)),
            Write(self.watch, "late", self.watch.late, late),
            Write(self, "plan", self.plan, plan),
            Write(self, "last", self.last, plan or self.last),
            Write(self, "failed", self.failed, failed),
            Write(self, "checked", self.checked, Checked() if plan is None else self.checked),
            Write(self, "blocks", self.blocks, asked.blocks),
        ]
        layers = self.factories.layers(plan, failed)
        with self.deferred.deferring() if layers else nullcontext():
            replaced, missed = self.binder.commit(layers, imported, also, findings)
        # Another thread may have imported a module between the search for conflicts and the commit.
        self.watch.late |= missed
        if not same:
            self.factories.keep_only(plan, failed)
        for item in replaced:
            if self.binder.effect_of(item) == "replaced":
                self.deferred.warn(f"{item} since shim bound it; it is left alone")
        if imported is not None and plan is not None:
            require_none(plan, imported[0])

    # Reports

    def report(self, otherwise: Callable[[], Plan]) -> Report:
        """The state of every patch now, also on the models of the last `check` that still live. See catch_up().

        otherwise: makes a plan to report on if there has been none.
        """
        last = self.last if self.last is not None and not another_copy(self.last) else None
        return self._on_models(self.checked.living(), self.plan or not_applied(last or otherwise()), raising=False)

    def check(self, models: list[Any] | None, plan: Plan) -> Report:
        """The report for these models (None: those of the last check). Raises errors of the patches' own checks.

        Call catch_up() before: `_api` compares the ranks between the two.

        plan: the plan in force, used if another thread reverts it meanwhile.
        """
        models = self.checked.living() if models is None else models
        self.checked.remember(models)
        return self._on_models(models, self.plan or plan, raising=True)

    def effects(self, plan: Plan) -> dict[str, str]:
        """Patch id -> what foreign objects, or a failure, leave of the patch (see ranks.EFFECTS)."""
        patches = self._read_back(plan, {}).patches
        states = {id: patch.state for id, patch in patches.items() if patch.state in ("conflict", "failed")}
        return {id: "in part" for id, patch in patches.items() if patch.is_partial} | states

    def _on_models(self, models: list[Any], plan: Plan, *, raising: bool) -> Report:
        held: dict[str, tuple[str, ...]] = {}
        for id, text in self.factories.resources():
            held[id] = (*held.get(id, ()), text)
        states = States(self._read_back(plan, held), plan, self.binder)
        for id, sentence in others_relied_on(plan, self.binder):  # without the lock: it may read files
            states.add(Claim(id, "", sentence))
        found = states.report()
        if not models and not self.binder.found.open and not self.binder.found.around:
            return found
        from shim._engine.models import with_findings  # here, because apply() needs none of it

        return with_findings(found, models, plan, self.binder, self.checked, raising=raising)

    def _read_back(self, plan: Plan, held: Mapping[str, tuple[str, ...]]) -> Report:
        with self.lock:
            return read_report(plan, self.binder, {} if self.plan is None else self.failed, held)

    # For others to ask

    def find_conflicts(self, plan: Plan) -> Plan:
        """The plan with the conflicts that switch_to() would find now."""
        with self.lock:
            return with_conflicts(plan, self.binder, self.binder.ran(plan.awaited))[0]

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
            return self.binder.beneath(value)


def _failure(error: BindError, plan: Plan | None) -> BindError:
    releases = () if plan is None else plan.environment.installed.values()
    release = ", ".join(f"{i.distribution} {i.raw}" for i in releases)
    return BindError(
        f"{error.patch} failed and was rolled back as a whole: {error} (on {release}). Remedy: run without it "
        f"(MEGATRON_SHIM_EXCLUDE={error.patch}) and report it with the output of `shim doctor`.",
        error.patch,
    )


def _is_same(one: Plan, other: Plan) -> bool:
    return one.options == other.options and one.decisions == other.decisions


# The engine of this process. It holds all of shim's state, except the entered overrides of shim.config_override, which
# works without apply() (shim._config_override.recompute).
ENGINE = Engine()


def _is_ending() -> bool:
    """Whether Python takes its modules apart: nothing can be imported any more, and nothing need be restored."""
    return sys is None or sys.meta_path is None  # Python sets both to None before it collects what is left


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: ENGINE.after_fork())
