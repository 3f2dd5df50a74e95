"""The engine: one object that holds all state of shim in a process, and keeps the process in step with the plan.

The invariant: a transaction (apply, revert, the begin and end of a with-block, an import) is one thing. It is prepared
on copies, where every error and interrupt leaves the process as it was. Then names and records, `plan` included, are
written in one step of the interpreter (switch.py). What follows from the plan is brought in step after it, by whoever
comes next if the transaction is interrupted there (`_recover`).

- Whoever calls shim from inside of a transaction of the same thread (a factory, a signal handler, a finalizer) reads
  what was in force before it, and is refused any change. The end of a with-block waits until the transaction is over,
  and so does what an import has to be bound.
- A forked process has the state before or after a transaction of another thread, and a lock of its own.

Whenever `lock` is free:
- `plan` is the plan in force, conflicts included; None if nothing is wanted.
- The binder's chains match the plan in all modules that have run to the end, without the patches in `failed`. Modules
  in `watch.late` are the exception; catch_up() brings them up to date.
- `watch` follows from the plan, and so do `stand_ins` and `variables`, unless `settled` is another one. The import hook
  is installed if there is a module to watch.
- The plan is for the files that the loaded modules ran, as far as anybody has looked: see keep_tied.
- `factories` has factories of the plan only. Everything else that patches hold has ended, or is reported until it can
  end.

`lock` guards every field, and is held while a transaction is prepared and written. No code imports, logs or asks
finders under `lock`: another thread may hold an import lock, or the lock of a logging handler, while it waits for
`lock`. Messages wait in `deferred` instead. `wants` runs for every import of the process and takes no lock.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

from shim._engine.aliases import namespace_of
from shim._engine.binder import Binder
from shim._engine.chain import Imported
from shim._engine.checked import Checked
from shim._engine.conflicts import require_none, warnings_for, with_conflicts
from shim._engine.contexts import Block, Context, Contexts
from shim._engine.deferred_log import DeferredLog, short_of
from shim._engine.ending import is_ending
from shim._engine.factories import Factories
from shim._engine.import_hook import ImportHook
from shim._engine.modules import (
    import_what_binding_needs,
    locked_modules,
    may_bind_within,
)
from shim._engine.records import Findings
from shim._engine.relied import with_relied_on
from shim._engine.report import Report
from shim._engine.stand_ins import StandIns, stand_ins_of
from shim._engine.switch import Write
from shim._engine.tied import Tie, made_anew
from shim._engine.variables import Variables
from shim._engine.verify import not_applied, read_report
from shim._engine.watch import Watch
from shim._engine.within import is_owned, is_within, refused_within
from shim._errors import BindError, NotMetError
from shim._planning.plan import Plan
from shim._planning.requirements import enforce
from shim._releases.sources import Sources

__all__ = ["ENGINE", "Engine"]


class Engine:
    """Brings the process to a plan, keeps it there while modules are imported, and reports the state.

    `_api` uses `plan`, `find_conflicts`, `adopt`, `release`, `catch_up`, `report`, `check`, `warn` and `new_sources`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.deferred = DeferredLog(self._is_within)
        self.binder = Binder()
        self.factories = Factories(lambda: self.lock, self.deferred)
        self.contexts = Contexts()
        self.variables = Variables()
        self.stand_ins = StandIns()
        self.checked = Checked()
        self.plan: Plan | None = None
        self.last: Plan | None = None  # the last plan that was wanted
        self.settled: Plan | None = None  # the plan that everything follows
        self.adoptions = 0  # how many times adopt() or release() set out to change the plan
        self.failed: dict[str, str] = {}  # patch -> why it could not be bound under this plan
        self.importing: dict[str, ModuleType] = {}  # modules of targets that have run, and whose import is not over
        self.ran_within: frozenset[str] = frozenset()  # modules of targets whose code ran within a transaction
        self.watch = Watch(ImportHook(self.wants, self.before_import, self.after_import))
        self.tie = Tie()
        self.renewing: set[int] = set()  # threads that make the plan anew: nobody catches up with the old one then
        self._sources: Sources | None = None
        self._known: Callable[..., Any] | None = None

    # One at a time

    def _is_within(self) -> bool:
        return is_within(self.lock, globals())

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
        for name, module in list(self.importing.items()):
            if sys.modules.get(name) is not module:  # its import has failed, and nobody has unbound it
                self.binder.abandon(name)
                self.importing.pop(name, None)
        if self.settled is not self.plan:
            self._settle()

    def _settle(self) -> None:
        """Stand-ins and variables follow the plan in force. The caller holds the lock."""
        plan = self.plan
        if plan is None:
            self.checked.forget()
        self.stand_ins.follow(plan)
        self.deferred.warn_once(self.variables.follow(plan))
        self.settled = plan

    # Plans

    def new_sources(self, known: Callable[..., Any] | None) -> Sources:
        """Sources for a new plan. They reuse what the last plan's Sources have read. `known`: see Sources."""
        self._known = known
        self._sources = self.tie.sources(self._sources, known)
        return self._sources

    def keep_tied(self, why_not: Callable[[Plan], str] | None = None) -> None:
        """Make the plan in force anew if `why_not` says that it does not fit this process. Called without the lock.

        NotMetError if the new plan does not meet the demands of the call that the plan was made for. The plan stays
        in force then, and so does what is bound.
        """
        if self._is_within():
            return  # whoever comes next asks again
        plan = self.plan
        why = "" if plan is None else (why_not or self.tie.amiss)(plan)
        if plan is None or not why:
            return
        thread = threading.get_ident()
        self.renewing.add(thread)  # the old plan would take upstream's functions of another copy for conflicts
        try:
            self.adopt(self._made_anew(plan, why), instead=plan)
        except NotMetError as error:
            raise NotMetError(f"{why}. Until then: {error}") from error
        finally:
            self.renewing.discard(thread)

    def _is_renewed(self, plan: Plan) -> bool:
        """Whether the plan that a block restores did not fit this process any more, and has been made anew."""
        why = self.tie.amiss(plan)
        if why:
            fresh = self._made_anew(plan, why)
            with self.lock:
                self.contexts.open = self.contexts.renewed(plan, fresh)
        return bool(why)

    def _made_anew(self, plan: Plan, why: str) -> Plan:
        self.warn([f"{why}. The plan is made anew for it."])
        return made_anew(plan, self.new_sources(self._known))

    def find_conflicts(self, plan: Plan) -> Plan:
        """The plan with the conflicts that adopt() would find now."""
        if self._misses(plan, ()):
            import_what_binding_needs()
        with self.lock:
            return with_conflicts(plan, self.binder)[0]

    def warn(self, texts: Iterable[str]) -> None:
        """Log each text as a warning, once in the process."""
        with self.lock:
            self.deferred.warn_once(texts)
        self.deferred.flush()

    def warn_of(self, findings: Iterable[tuple[str, str, str, str]]) -> None:
        """Log each warning about a patch once in the process: see DeferredLog.warn_of."""
        with self.lock:
            for finding in findings:
                self.deferred.warn_of(*finding)
        self.deferred.flush()

    def beneath(self, value: Any) -> Any:
        """The object beneath `value` if `value` is a wrapper of shim's, else `value`."""
        with self.lock:
            return self.binder.wrappers.beneath(value)

    # Adopting a plan

    def adopt(self, wanted: Plan | None, context: Context | None = None, instead: Plan | None = None) -> None:
        """Make `wanted` the plan in force (None: nothing is wanted). After an error the earlier plan stays in force.

        context: the with-block that the plan belongs to, until `release`.
        instead: the plan that was made anew. Nothing is done if another plan has come into force.
        """
        if wanted is None and is_ending():
            return
        if self._is_within():
            raise refused_within("revert" if wanted is None else "apply" if context is None else "patched")
        try:
            if wanted is not None:
                self.watch.wait_for(wanted, self.binder.loaded)
                self.warn_of(warnings_for(wanted))
                enforce(wanted)
            before = self._load_and_switch(wanted, context, instead)
            if context is None and wanted is not None and before is not None:
                self._say_what_changed(before, wanted)
            if self.ran_within or self.contexts.over() is not None:
                self._catch_up()
        except BindError as error:
            if error.patch is None:
                raise
            raise _failure(error, wanted) from error
        finally:
            self._finish()

    def _say_what_changed(self, before: Plan, wanted: Plan) -> None:
        """Warn if apply() has taken what another call had asked for. A with-block gives it back, and is silent."""
        if before.options == wanted.options and before.matrix.path == wanted.matrix.path:
            return
        from shim._planning.second_call import changed_by  # here, because most processes call apply() once

        text = changed_by(wanted, before)
        if text:
            self.warn([short_of(text)])

    def _load_and_switch(self, wanted: Plan | None, context: Context | None, instead: Plan | None) -> Plan | None:
        """Load the needed factories, then switch. Loops until no factory is missing. Returns the plan before.

        Patch modules are imported without the lock, so another thread may import a further target meanwhile.
        """
        postponed: set[str] = set()
        while True:
            with self.lock:
                self._recover()
                if wanted is None or not self._misses(wanted, postponed):
                    before = self.plan
                    if instead is None or (before is not None and before.environment is instead.environment):
                        self._switch(wanted, context, instead)
                    return before
                self.watch.add(self.watch.of(wanted))
            postponed |= self.factories.load(wanted, postponed, self.binder.loaded)

    def _switch(self, wanted: Plan | None, context: Context | None, instead: Plan | None) -> None:
        """Find conflicts, check the requirements again, then bind and unbind; all or nothing."""
        plan, findings = self._with_conflicts(wanted)
        if plan is not None and plan is not wanted:
            enforce(plan)
        blocks = self.contexts.open
        if instead is not None and plan is not None:
            blocks = self.contexts.renewed(instead, plan)
        elif context is None:
            self.contexts.refuse_from_outside("revert" if plan is None else "apply")
        elif plan is not None:
            blocks = self.contexts.entered(context, plan, self.plan)
        self.adoptions += 1
        self._write(plan, {}, findings, blocks)

    def release(self, context: Context) -> None:
        """End a with-block: its earlier plan is in force again, unless another block with the same plan is open.

        Requirements and the lock file are not checked again: the earlier plan met them when it was applied. Within a
        transaction of this thread, as in a finalizer, the block ends once that is over.
        """
        context.over = True
        if not is_ending() and not self._is_within():
            self._end_blocks()

    def _end_blocks(self) -> None:
        """End the with-blocks that are over, the newest first."""
        renewed = False
        try:
            while True:
                block = self.contexts.over()
                if block is None:
                    return
                if not renewed and block.beneath is not None and self._is_renewed(block.beneath):
                    renewed = True
                    continue
                if block.beneath is not None:
                    self.watch.wait_for(block.beneath, self.binder.loaded)
                with self.lock:
                    self._recover()
                    if block not in self.contexts.open:
                        continue  # another thread has ended it
                    blocks, restores = self.contexts.without(block)
                    self.adoptions += 1
                    if not restores:
                        self.contexts.open = blocks
                        continue
                self._bring_up_to_date(ending=block)
        finally:
            self._finish()

    def _bring_up_to_date(
        self,
        imported: Imported | None = None,
        only_if_changed: bool = False,
        may_load: bool = True,
        ending: Block | None = None,
    ) -> bool:
        """Bind and unbind as the plan in force asks, in modules that have run. BindError names the failed patch.

        Loops for two reasons: patch modules are imported without the lock, so the plan may change meanwhile, and after
        one patch fails the others are still bound. Returns whether everything was done.

        imported: see Binder.commit.    only_if_changed: change nothing unless a conflict has come or gone.
        may_load: whether patch modules may be imported.    ending: a with-block that ends, whose earlier plan returns.
        """
        first: BindError | None = None
        postponed: set[str] = set()
        fresh: dict[str, str] = {}  # patches that fail now
        adoptions = self.adoptions
        while True:
            try:
                with self.lock:
                    self._recover()
                    blocks, plan, failed = self.contexts.open, self.plan, self.failed
                    if ending is not None and ending in blocks:
                        (blocks, _), plan, failed = self.contexts.without(ending), ending.beneath, {}
                    if self.adoptions != adoptions:  # what failed, failed under another plan
                        adoptions, fresh = self.adoptions, {}
                    failed = {**failed, **fresh}
                    but = {*failed, *postponed}
                    if plan is None or not may_load or not self._misses(plan, but):
                        found, findings = self._with_conflicts(plan)
                        done = found is None or not self._misses(found, but)
                        if done or not may_load:
                            found = found if done else plan  # leave an ended conflict for later
                            if found is not self.plan or fresh or not only_if_changed:
                                self._write(found, failed, findings, blocks, imported)
                                if found is not None:
                                    require_none(found, imported and imported[0])
                            else:
                                self.binder.found = findings
                            break
                        plan = found
                if plan is not None:
                    postponed |= self.factories.load(plan, but, self.binder.loaded)
                    only_if_changed = False  # patches that waited for these factories are bound now
            except BindError as error:
                if error.patch is None or error.patch in self.failed or error.patch in fresh:
                    raise
                # The whole patch is unbound, also from targets that were bound at earlier imports.
                fresh[error.patch] = str(error)
                first, only_if_changed = first or error, False
        if first is not None:
            raise _failure(first, plan) from first
        return done

    def _with_conflicts(self, plan: Plan | None) -> tuple[Plan | None, Findings]:
        """The plan with its conflicts. Plans get conflicts here only, apart from find_conflicts()."""
        if plan is None:
            return None, self.binder.looking().found.forgotten(self.binder.chains)
        found, findings = with_conflicts(plan, self.binder)
        if found is not plan:
            for finding in warnings_for(found):
                self.deferred.warn_of(*finding)
        return found, findings

    def _misses(self, plan: Plan, but: Collection[str]) -> bool:
        return any(True for _ in self.factories.missing(plan, but, self.binder.loaded))

    def _write(
        self,
        plan: Plan | None,
        failed: dict[str, str],
        findings: Findings,
        blocks: tuple[Block, ...],
        imported: Imported | None = None,
    ) -> None:
        """Bind the layers of a plan whose factories are loaded, and make it the plan in force, in one step."""
        # Asked before the commit: a module that another thread imports meanwhile counts as late.
        if plan is self.plan:  # as at most imports
            also = [self.watch.still_late(self.binder.loaded)]
        else:
            modules = self.watch.of(plan, stand_ins_of(plan))
            also = [*self.watch.writes(modules, self.binder.loaded)]
            self.watch.add(modules)
        also += [
            Write(self, "plan", self.plan, plan),
            Write(self, "last", self.last, plan or self.last),
            Write(self, "failed", self.failed, failed),
            Write(self.contexts, "open", self.contexts.open, blocks),
        ]
        layers = self.factories.layers(plan, failed)
        with self.deferred.deferring() if layers else nullcontext():
            lost = self.binder.commit(layers, imported, also, findings)
        if self.settled is not plan:
            self._settle()
        self.factories.keep_only(plan, failed)
        for item in lost:
            if self.binder.effect_of(item) == "replaced":
                self.deferred.warn(f"{item} since shim bound it; it is left alone")

    def _finish(self) -> None:
        """Clean up after adopt() and release(), also after an error: end what patches hold, and log."""
        with self.lock:
            self.watch.tidy()
            self.factories.keep_only(self.plan, self.failed)
        self.factories.end_kept()
        self.deferred.flush()

    # Imports

    def wants(self, module: str) -> bool:
        """Whether the import hook is to act on the import of a module."""
        # This runs for every import of the process, so it takes no lock and does little work. It does not catch up
        # while a patch module is being imported: catching up may import the same module a second time.
        watch = self.watch
        if sys.modules.keys().isdisjoint(watch.late) or self.factories.loading or module in watch.patches:
            return module in watch.watched
        if self._is_within() or self.renewing or not may_bind_within(module):
            return module in watch.watched
        if self.plan is not None and self.tie.amiss(self.plan):
            return True  # after_import() makes the plan anew
        # True if work is left: after_import() does it when this module has run.
        return not self._catch_up(may_load=False) or bool(self.deferred) or module in watch.watched

    def before_import(self, module: ModuleType) -> None:
        self.keep_tied(lambda plan: self.tie.before(plan, module))
        missing = self.stand_ins.missing(namespace_of(module)["__name__"])
        with self.lock:
            self.stand_ins.give(module, missing)

    def after_import(self, module: ModuleType, meanwhile: Callable[[], Sequence[str]]) -> None:
        name = namespace_of(module)["__name__"]
        if self._is_within():  # it is late, and bound when the transaction is over
            self.ran_within |= {name}
            return
        if self.watch.is_only_tied(name) and not self.deferred and sys.modules.keys().isdisjoint(self.watch.late):
            self.keep_tied(lambda plan: self.tie.after(plan, module))
            return
        with self.lock:
            self.importing[name] = module
            self.binder.modules.executed.add(name)
            self.watch.late -= {name}
            self.binder.renew(module)
            # Each import of a target tries the patch again, and raises again.
            tried = {id for id in self.failed if self.plan and name in self.plan[id].modules}
            if tried:
                self.failed = {id: why for id, why in self.failed.items() if id not in tried}
        try:
            self.keep_tied(lambda plan: self.tie.after(plan, module) or self.tie.amiss(plan))
            self._bring_up_to_date((name, [name, *meanwhile()]))
            if self.ran_within or self.contexts.over() is not None:
                self._catch_up()
        except BaseException:
            with self.lock:
                self.binder.modules.executed.discard(name)
                if self.binder.loaded(name) is None:  # not a reload: importlib removes the module from sys.modules
                    self.binder.abandon(name)
            raise
        finally:
            with self.lock:
                self.binder.modules.executed.discard(name)
            self.deferred.flush()
        self.importing.pop(name, None)

    def catch_up(self) -> None:
        """Do the work that had to wait, unless this call comes from inside of a transaction.

        Bind targets in modules that were half imported at apply() or came past the hook. Look for aliases in modules
        that were half imported at the last search. Bind targets that a foreign object has left. End blocks that are
        over. Make the plan anew if modules are loaded that it was not made for: see keep_tied, also for the error.
        """
        if self._is_within():
            return
        self.keep_tied()
        try:
            self._catch_up()
        finally:
            self.factories.end_kept()
            self.deferred.flush()

    def _catch_up(self, may_load: bool = True) -> bool:
        """See catch_up. Returns whether everything was done.

        may_load: whether patch modules may be imported. False while importlib searches for a module, because importlib
        then holds a lock of the whole process, which another thread's import of a patch module waits for.
        """
        if may_load and self.contexts.over() is not None:
            self._end_blocks()
        with self.lock:
            self._recover()
            if not may_load and self.plan is not None and self._misses(self.plan, self.failed):
                return False
            for name in [name for name in self.ran_within if self.binder.loaded(name) is not None]:
                self.binder.renew(sys.modules[name])
                self.ran_within -= {name}
            ready = self.watch.take_ready(self.binder.loaded)
            places = self.binder.places
            due = bool(ready or self.binder.modules.overdue() or places.given_back() or places.taken())
        return self._bring_up_to_date(only_if_changed=not due, may_load=may_load)

    # Reports

    def report(self, otherwise: Callable[[], Plan]) -> Report:
        """The state of every patch now, also on the models of the last `check` that still live.

        otherwise: makes a plan to report on if there has been none.
        """
        if is_ending():
            return self._read_back(self.plan or not_applied(self.last or otherwise()), {})
        self.catch_up()
        models = self.checked.living()
        report, plan = self._read(self.plan or not_applied(self._last_that_fits() or otherwise()))
        return self._with_findings(report, models, plan, raising=False)

    def _last_that_fits(self) -> Plan | None:
        return None if self.last is None or self.tie.amiss(self.last) else self.last

    def check(self, models: list[Any] | None, plan: Plan) -> Report:
        """The report for these models (None: those of the last check). Raises errors of the patches' own checks.

        Call catch_up() before: `_api` compares the ranks between the two.

        plan: the plan in force, used if another thread reverts it meanwhile.
        """
        if models is not None:
            self.checked.remember(models)
        models = self.checked.living() if models is None else models
        report, plan = self._read(self.plan or plan)
        return self._with_findings(report, models, plan, raising=True)

    def _with_findings(self, report: Report, models: list[Any], plan: Plan, *, raising: bool) -> Report:
        if not models:
            return report
        from shim._engine.models import with_findings  # here, because no plan and no apply() has a model

        return with_findings(report, models, plan, self.binder, self.checked, raising=raising)

    def effects(self, plan: Plan) -> dict[str, str]:
        """Patch id -> what somebody else's objects, or a failure, leave of the patch (see ranks.EFFECTS)."""
        patches = self._read_back(plan, {}).patches
        states = {id: patch.state for id, patch in patches.items() if patch.state in ("conflict", "failed")}
        return {id: "in part" for id, patch in patches.items() if patch.is_partial} | states

    def _read(self, plan: Plan) -> tuple[Report, Plan]:
        return with_relied_on(self._read_back(plan, self._held()), plan, self.binder), plan

    def _read_back(self, plan: Plan, held: Mapping[str, tuple[str, ...]]) -> Report:
        with self.lock:
            return read_report(plan, self.binder, {} if self.plan is None else self.failed, held)

    def _held(self) -> dict[str, tuple[str, ...]]:
        """Patch id -> what the patch holds in the process now, in words. Called without the lock."""
        found: dict[str, tuple[str, ...]] = {}
        with self.lock:
            variables = list(self.variables.held())
        for id, text in [*variables, *self.factories.held()]:
            found[id] = (*found.get(id, ()), text)
        return found


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
