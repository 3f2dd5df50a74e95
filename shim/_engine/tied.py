"""Ties the plan in force to the files that this process runs.

A plan is made from files. Between the plan and an import another copy may come first on sys.path, a path may come that
was not there, or other code may edit a file. So each file is compared with what the plan has read: just before its code
runs, just after, and whenever a report is made. The engine makes a plan anew that no longer fits.

A file is the same if its stamp is (files.stamp_of: a new time of change is enough to differ), or else its content. What
has run is remembered: a later plan judges it as it was when it ran, and not the present file.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shim._engine.aliases import namespace_of
from shim._engine.bytecode import stale_bytecode
from shim._engine.modules import is_initialising, is_lazy
from shim._errors import NotMetError, SourceError
from shim._planning.plan import Plan, make_plan
from shim._releases.detect import DISTRIBUTIONS, PATCHED, detect, place_of, same_place
from shim._releases.files import stamp_of
from shim._releases.sources import Seen, Sources, digest_of_file, file_of

if TYPE_CHECKING:
    from shim._engine.engine import Engine

__all__ = ["Renewal", "Tie", "packages_of", "tied_modules"]

_PACKAGES = {DISTRIBUTIONS[distribution].package: distribution for distribution in PATCHED}
_BEFORE = "Remedy: put it on sys.path before {}, in front of everything else"
_EDITED = "Remedy: edit files before the process starts, or call shim.apply() after the edit"


def packages_of(plan: Plan | None) -> frozenset[str]:
    """The packages that patches are of, installed or not. Empty if all patches are left out."""
    if plan is None or all(decision.action == "excluded" for decision in plan.decisions.values()):
        return frozenset()
    return frozenset(_PACKAGES)


def tied_modules(plan: Plan | None) -> frozenset[str]:
    """These packages, and all modules that the plan has read, or has looked for."""
    packages = packages_of(plan)
    return packages | plan.environment.sources.modules if plan is not None and packages else frozenset()


class Tie:
    """What has run in this process, and whether a plan fits it. An answer is a sentence with a remedy; "" if it fits.

    Callers do not hold the engine's lock: files are read here.
    """

    def __init__(self) -> None:
        self._ran: dict[str, tuple[Callable[[], Any], Seen]] = {}  # a reference to the module, and what it ran
        self._untrue: dict[str, tuple[Callable[[], Any], str]] = {}  # modules that ran what their files do not say
        self._running: dict[str, tuple[object, str | None]] = {}  # the stamp and the digest before the code began

    def sources(self, before: Sources | None, known: Callable[..., Any] | None) -> Sources:
        """Sources for a new plan, in which a module that has run is what ran."""
        ran = {name: seen for name, (module, seen) in list(self._ran.items()) if _is_loaded(name, module)}
        untrue = {name: why for name, (module, why) in list(self._untrue.items()) if _is_loaded(name, module)}
        return Sources(before=before, known=known, ran=ran, untrue=untrue)

    def before(self, plan: Plan, module: ModuleType) -> str:
        """Why the plan does not fit a module whose code is about to run."""
        name = namespace_of(module)["__name__"]
        if sys.modules.get(name) is not module or name not in tied_modules(plan):
            return ""  # a private copy, or another module
        self._ran.pop(name, None), self._untrue.pop(name, None)
        elsewhere = name in _PACKAGES and _elsewhere(plan, name)
        if elsewhere:
            return elsewhere
        why, now = _differs(plan, name, module)
        self._running[name] = now
        stale = stale_bytecode(module)
        if stale:
            text = f"{name} runs {stale}, which was not made from {file_of(module)}"
            self._untrue[name] = weakref.ref(module), text
            return f"{text}. Remedy: remove {stale}"
        return why

    def after(self, plan: Plan, module: ModuleType) -> str:
        """Why the plan does not fit a module whose code has just run."""
        name = namespace_of(module)["__name__"]
        before = self._running.pop(name, None)
        if before is None or name in self._untrue:
            return ""
        why, now = _differs(plan, name, module)
        if now[0] != before[0] and now[1] != before[1]:
            text = f"{file_of(module)} was changed during its import, so it is unknown which text ran"
            self._untrue[name] = weakref.ref(module), text
            return f"{text}. {_EDITED}"
        if not why:
            self._note(plan, name, module)
        return why

    def mismatch(self, plan: Plan) -> str:
        """Why the plan does not fit the modules that are loaded: they may have come past the hook."""
        for package in packages_of(plan):
            if package in sys.modules and not is_lazy(sys.modules[package]):
                elsewhere = _elsewhere(plan, package)
                if elsewhere:
                    return elsewhere
        for name in sorted(tied_modules(plan) & sys.modules.keys()):
            module = sys.modules.get(name)
            if module is None or self._knows(name, module) or is_lazy(module) or is_initialising(module):
                continue
            why, _ = _differs(plan, name, module)
            if why:
                return why
            self._note(plan, name, module)
        return ""

    def _knows(self, name: str, module: object) -> bool:
        ran = self._ran.get(name) or self._untrue.get(name)
        return ran is not None and ran[0]() is module

    def _note(self, plan: Plan, name: str, module: ModuleType) -> None:
        seen = plan.environment.sources.seen(name)
        if seen is not None and seen[0] and issubclass(type(module), ModuleType):
            self._ran[name] = weakref.ref(module), seen


class Renewal:
    """Makes the plan in force anew when it is due, from sources that reuse what earlier plans have read.

    threads: those that make the plan anew. They do no late work meanwhile: the old plan would take upstream's functions
        of another copy for conflicts.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tie = Tie()
        self.threads: set[int] = set()
        self._sources: Sources | None = None
        self._known: Callable[..., Any] | None = None

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
        engine = self._engine
        if engine.is_within():
            return  # the next caller asks again
        plan = engine.plan
        why = "" if plan is None else (why_not or self.tie.mismatch)(plan)
        if plan is None or not why:
            return
        thread = threading.get_ident()
        self.threads.add(thread)
        try:
            engine.switch_to(self._made_anew(plan, why), instead=plan)
        except NotMetError as error:
            raise NotMetError(f"{why}. Until then: {error}") from error
        finally:
            self.threads.discard(thread)

    def is_renewed(self, plan: Plan) -> bool:
        """Whether the plan that a with-block restores did not fit this process any more, and has been made anew."""
        engine, why = self._engine, self.tie.mismatch(plan)
        if why:
            fresh = self._made_anew(plan, why)
            with engine.lock:
                engine.contexts.open = engine.contexts.renewed(plan, fresh)
        return bool(why)

    def _made_anew(self, plan: Plan, why: str) -> Plan:
        self._engine.warn([f"{why}. The plan is made anew for it."])
        environment = detect(self.new_sources(self._known))
        return replace(make_plan(environment, plan.matrix, plan.options, plan.losses), asked_by=plan.asked_by)


def _is_loaded(name: str, module: Callable[[], Any]) -> bool:
    """Whether the module that is referred to is alive, and the one that imports get."""
    found = module()
    return found is not None and found is sys.modules.get(name)


def _elsewhere(plan: Plan, package: str) -> str:
    """Where a loaded package comes from, if the plan was not made for that place."""
    distribution = _PACKAGES[package]
    planned = plan.environment.installed.get(distribution)
    file = file_of(sys.modules[package])
    if planned is not None and file is not None and os.path.dirname(file) == planned.location:
        return ""
    try:
        place = place_of(distribution, Sources())
    except SourceError:
        return ""
    if place is None or (planned is not None and same_place(place, planned.location)):
        return ""  # a module that other code has made by hand has no place
    expected = f"{planned} was" if planned is not None else f"no {distribution} was"
    remedy = _BEFORE.format(plan.asked_by.partition(" at ")[0])
    return f"{package} is imported from {place}, but {expected} there for {plan.asked_by}. {remedy}"


def _differs(plan: Plan, name: str, module: ModuleType) -> tuple[str, tuple[object, str | None]]:
    """Why the file of a module is not what the plan has read, and its stamp and (if it was read) its digest now."""
    seen = plan.environment.sources.seen(name)
    path = file_of(module)
    if path is None:
        return "", (None, None)
    now = stamp_of(path)
    if seen is None or (seen[0] == path and seen[1] == now):
        return "", (now, None)
    try:
        digest = digest_of_file(path)
    except SourceError:
        digest = None
    if (
        seen[2] is not None
        and seen[2] == digest
        and (seen[0] == path or os.path.realpath(seen[0]) == os.path.realpath(path))
    ):
        return "", (now, digest)
    if not seen[0] or os.path.realpath(seen[0]) != os.path.realpath(path):
        remedy = _BEFORE.format(plan.asked_by.partition(" at ")[0])
        why = f"{name} is imported from {path}, and not from {seen[0] or 'nowhere'}, as {plan.asked_by} had planned for"
        return f"{why}. {remedy}", (now, digest)
    return f"{path} has changed since it was read for {plan.asked_by}. {_EDITED}", (now, digest)
