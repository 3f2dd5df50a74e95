"""The engine: one object that holds all state of shim in a process, and keeps the process in step with the plan.

What holds whenever `lock` is free:
- `plan` is the plan in force, with its conflicts found; None where nothing is wanted.
- The binder's chains are what the plan wants in all modules that have run to the end, without the patches in `failed`.
  Exceptions are modules that `watch` has as late, which catch_up() brings up to date.
- What `watch`, `stand_ins` and `variables` have follows from the plan; the import hook is installed if there is
  something to watch.
- `factories` has those of the plan at most; what other patches keep has ended, or is told of until it can end.

`lock` guards every field, and is held while the binder writes. Under it nobody imports, logs, or asks finders: another
thread may hold an import lock, or the lock of a logging handler, and wait for this one. What is to be logged waits in
`deferred`. `wants` is asked for every import of the process and takes no lock.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

from shim._engine.aliases import namespace_of
from shim._engine.binder import Binder
from shim._engine.chain import Imported
from shim._engine.conflicts import require_none, warnings_for, with_conflicts
from shim._engine.contexts import Context, Contexts
from shim._engine.deferred_log import DeferredLog, logger
from shim._engine.factories import Factories
from shim._engine.import_hook import ImportHook
from shim._engine.models import Checked, with_findings
from shim._engine.report import Report
from shim._engine.stand_ins import StandIns
from shim._engine.variables import Variables
from shim._engine.verify import not_applied, read_report
from shim._engine.watch import Watch
from shim._errors import BindError, ShimError
from shim._planning.plan import Plan
from shim._planning.requirements import enforce
from shim._releases.sources import Sources

__all__ = ["ENGINE", "Engine"]


class Engine:
    """Brings the process to a plan, keeps it there while modules are imported, and says what is.

    `_api` asks `plan`, `find_conflicts`, `adopt`, `release`, `catch_up`, `report`, `check`, `warn` and `new_sources`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.deferred = DeferredLog()
        self.binder = Binder()
        self.factories = Factories(self.lock, self.deferred)
        self.contexts = Contexts()
        self.variables = Variables()
        self.stand_ins = StandIns()
        self.checked = Checked()
        self.plan: Plan | None = None
        self.last: Plan | None = None  # the last plan that was wanted
        self.adoptions = 0  # how often a plan was to come in force
        self.failed: dict[str, str] = {}  # by patch, why it could not be bound under this plan
        self.watch = Watch(ImportHook(self.wants, self.before_import, self.after_import))
        self._sources: Sources | None = None

    # Plans

    def new_sources(self, known: Callable[..., Any]) -> Sources:
        """Sources for a new plan, which know what those of the last plan have read. `known`: see Sources."""
        self._sources = Sources(before=self._sources, known=known)
        return self._sources

    def find_conflicts(self, plan: Plan) -> Plan:
        """The plan as it would be if it were adopted now."""
        with self.lock:
            return with_conflicts(plan, self.binder)

    def warn(self, texts: Iterable[str]) -> None:
        """Warn of each of these once in the process."""
        with self.lock:
            self.deferred.warn_once(texts)
        self.deferred.flush()

    def beneath(self, value: Any) -> Any:
        """`value`, or where it is a wrapper of shim's what was there before it."""
        with self.lock:
            return self.binder.wrappers.beneath(value)

    # Adopting a plan

    def adopt(self, wanted: Plan | None, context: Context | None = None) -> None:
        """Make `wanted` the plan in force (None: nothing is wanted); on any error the plan before it stays.

        context: the with-block that it is for, until `release`.
        """
        try:
            if wanted is not None:
                self.watch.wait_for(wanted, self.binder.loaded)
                self.warn(warnings_for(wanted))
                enforce(wanted)
            try:
                self._load_and_switch(wanted, context)
            except BaseException:
                try:
                    self._bring_up_to_date()  # to the plan before, where the writes were done when an interrupt came
                except ShimError as error:
                    logger().warning("what was applied before could not be restored as a whole: %s", error)
                raise
        except BindError as error:
            if error.patch is None:
                raise
            raise _failure(error, wanted) from error
        finally:
            self._finish()

    def _load_and_switch(self, wanted: Plan | None, context: Context | None) -> None:
        """Load the factories that are needed at once, and switch when none is missing any more.

        Patch modules are imported without the lock, so another thread may import a target meanwhile.
        """
        postponed: set[str] = set()
        while True:
            with self.lock:
                if wanted is None or not self._misses(wanted, postponed):
                    self._switch(wanted, context)
                    return
                self.watch.add(wanted)
            postponed |= self.factories.load(wanted, postponed, self.binder.loaded)

    def _switch(self, wanted: Plan | None, context: Context | None) -> None:
        """Find conflicts, and where what is required is met all the same, bind and take off; all or nothing."""
        plan = None if wanted is None else self._with_conflicts(wanted)
        if plan is not None and plan is not wanted:
            enforce(plan)
        before, failed = self.plan, self.failed
        try:
            if context is None:
                self.contexts.refuse_from_outside("revert" if plan is None else "apply")
            elif plan is not None:
                self.contexts.enter(context, plan, before)
            self.adoptions += 1
            self.failed = {}
            self._follow(plan)
            self._commit()
        except BaseException:
            if context is not None:
                self.contexts.leave(context)
            self.failed = failed
            self._follow(before)
            raise

    def release(self, context: Context) -> None:
        """End a with-block: what it found in force is so again, unless another block is open that asks for the same.

        Asks neither for the requirements nor for the lock of what it found anew: they were met when that was applied.
        """
        if context.beneath is not None:
            self.watch.wait_for(context.beneath, self.binder.loaded)
        try:
            with self.lock:
                if not self.contexts.leave(context):
                    return
                self.adoptions += 1
                self.failed = {}
                self._follow(context.beneath)
            self._bring_up_to_date()
        finally:
            self._finish()

    def _follow(self, plan: Plan | None) -> None:
        """Make `plan` the plan in force, and all that follows from it, but for what is bound."""
        self.plan = plan
        self.last = plan or self.last
        if plan is None:
            self.checked.forget()
        self.stand_ins.follow(plan)
        self.deferred.warn_once(self.variables.follow(plan))
        self.watch.follow(plan, self.stand_ins.modules, self.binder.loaded)

    def _bring_up_to_date(
        self, imported: Imported | None = None, only_if_changed: bool = False, may_load: bool = True
    ) -> bool:
        """Bind and take off what the plan in force asks for in modules that have run; BindError names a failing patch.

        Loops because the patch modules are imported without the lock, and the plan may change meanwhile, and because
        the patches that do not fail are bound all the same.

        imported: see Binder.commit.    only_if_changed: leave all as it is where no conflict has come or gone.
        may_load: whether patch modules may be imported. Returns whether all was done.
        """
        first: BindError | None = None
        postponed: set[str] = set()
        while True:
            try:
                with self.lock:
                    plan, but = self.plan, {*self.failed, *postponed}
                    if plan is None or not may_load or not self._misses(plan, but):
                        found = None if plan is None else self._with_conflicts(plan)
                        done = found is None or not self._misses(found, but)
                        if done or not may_load:
                            found = found if done else plan  # a conflict that has ended waits
                            if found is not plan:
                                self._follow(found)
                            if found is not plan or not only_if_changed:
                                self._commit(imported)
                                if found is not None:
                                    require_none(found, imported and imported[0])
                            break
                        plan = found
                if plan is not None:
                    postponed |= self.factories.load(plan, but, self.binder.loaded)
                    only_if_changed = False  # what has waited for its factories is bound with them
            except BindError as error:
                if error.patch is None or error.patch in self.failed:
                    raise
                # The whole patch is taken off, also where earlier imports had bound it.
                with self.lock:
                    self.failed[error.patch] = str(error)
                first, only_if_changed = first or error, False
        if first is not None:
            raise _failure(first, plan) from first
        return done

    def _with_conflicts(self, plan: Plan) -> Plan:
        """The one place that looks for conflicts of a plan that is or comes in force."""
        found = with_conflicts(plan, self.binder)
        if found is not plan:
            self.deferred.warn_once(warnings_for(found))
        return found

    def _misses(self, plan: Plan, but: Collection[str]) -> bool:
        return any(True for _ in self.factories.missing(plan, but, self.binder.loaded))

    def _commit(self, imported: Imported | None = None) -> None:
        """Have the binder write what the plan in force asks for, as far as its factories are loaded."""
        # Asked before anything is looked at: what another thread imports meanwhile is still to be bound.
        late = frozenset(name for name in self.watch.targets if self.binder.loaded(name) is None)
        layers = self.factories.layers(self.plan, self.failed)
        with self.deferred.deferring() if layers else nullcontext():
            lost = self.binder.commit(layers, imported)
        for item in lost:
            self.deferred.warn(f"{item} since shim bound it; it is left alone")
        self.factories.keep_only(self.plan, self.failed)
        self.watch.late = late

    def _finish(self) -> None:
        """What is left to do once the lock is free, whether it went well or not."""
        with self.lock:
            self.watch.tidy()
            self.factories.keep_only(self.plan, self.failed)
        self.factories.end_kept()
        self.deferred.flush()

    # Imports

    def wants(self, module: str) -> bool:
        """Whether the import hook is to act on the import of a module."""
        # Asked for every import of the process, so without the lock, and with no more work than this.
        # Not while a patch module is being found: catching up may import that very module, and load it twice.
        watch = self.watch
        if sys.modules.keys().isdisjoint(watch.late) or self.factories.loading or module in watch.patches:
            return module in watch.watched
        # What cannot be done here is done when this module has run.
        return not self._catch_up(may_load=False) or bool(self.deferred) or module in watch.watched

    def before_import(self, module: ModuleType) -> None:
        missing = self.stand_ins.missing(namespace_of(module)["__name__"])
        with self.lock:
            self.stand_ins.give(module, missing)

    def after_import(self, module: ModuleType, meanwhile: Sequence[str]) -> None:
        name = namespace_of(module)["__name__"]
        with self.lock:
            self.binder.modules.executed.add(name)
            self.watch.late -= {name}
            self.binder.renew(module)
            for id in [id for id in self.failed if self.plan and name in self.plan[id].modules]:
                del self.failed[id]  # each import of a target tries again, and raises again
        try:
            self._bring_up_to_date((name, [name, *meanwhile]))
        except BaseException:
            with self.lock:
                self.binder.modules.executed.discard(name)
                if self.binder.loaded(name) is None:  # it is not being reloaded, so it leaves sys.modules
                    self.binder.abandon(name)
            raise
        finally:
            with self.lock:
                self.binder.modules.executed.discard(name)
            self.deferred.flush()

    def catch_up(self) -> None:
        """Bind target modules that were half imported at apply(), or that came in past the hook, look for aliases in
        modules that were half imported when they were looked for, and bind what a foreign object is gone from."""
        try:
            self._catch_up()
        finally:
            self.factories.end_kept()
            self.deferred.flush()

    def _catch_up(self, may_load: bool = True) -> bool:
        """See catch_up. Returns whether all was done.

        may_load: not within the search for a module. There importlib holds a lock of the whole process, and whoever
        imports a patch module meanwhile waits for it.
        """
        with self.lock:
            if not may_load and self.plan is not None and self._misses(self.plan, self.failed):
                return False
            ready = self.watch.take_ready(self.binder.loaded)
            due = bool(ready or self.binder.modules.overdue() or self.binder.places.given_back())
        return self._bring_up_to_date(only_if_changed=not due, may_load=may_load)

    # What is

    def report(self, otherwise: Callable[[], Plan]) -> Report:
        """The state of every patch at this moment, also on the models that `check` looked at last and that still live.

        otherwise: makes the plan that is shown where there was none.
        """
        self.catch_up()
        models = self.checked.living()
        report, plan = self._read(self.plan or not_applied(self.last or otherwise()))
        return with_findings(report, models, plan, self.binder, raising=False)

    def check(self, models: list[Any] | None, plan: Plan) -> Report:
        """The same for these models, or those that were checked last; errors of patches that look at them are raised.

        plan: the one in force, for where another thread reverts it meanwhile.
        """
        if models is not None:
            self.checked.remember(models)
        self.catch_up()
        models = self.checked.living() if models is None else models
        report, plan = self._read(self.plan or plan)
        return with_findings(report, models, plan, self.binder, raising=True)

    def _read(self, plan: Plan) -> tuple[Report, Plan]:
        held = self._held()
        with self.lock:
            failed = {} if self.plan is None else self.failed
            return read_report(plan, self.binder, failed, held), plan

    def _held(self) -> dict[str, tuple[str, ...]]:
        """By patch id what it keeps in the process at this moment, in words. Called without the lock."""
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


# The engine of this process. All that shim remembers is in it, but for what shim.config_override, which works without
# apply(), has entered (shim._config_override.recompute).
ENGINE = Engine()
