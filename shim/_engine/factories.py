"""The factories of patches: loaded when a target is imported, dropped when no plan needs them; what they may return."""

from __future__ import annotations

import importlib
import inspect
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from shim._engine.import_hook import is_initialising
from shim._engine.names import Layer
from shim._engine.reach import held_by
from shim._errors import BindError
from shim._planning.plan import Decision, Plan
from shim._resources import Resource

__all__ = ["Factories", "misfit"]


# Whether a factory's result can replace upstream's object: the same kind, and every call that upstream's takes


_TAKES = "_shim_takes"  # set by takes() of shim.patches._arguments


def _said_to_take(function: Any) -> frozenset[str] | None:
    code, names = vars(function).get(_TAKES, (None, None))
    return names if code == function.__code__ else None


def _wrong_kind(new: Any, old: Any) -> str:
    """Why `new` is not of the kind of `old`. Only real functions, classes and properties count, no proxies."""
    for kind, name in ((types.FunctionType, "function"), (type, "class"), (property, "property")):
        # type(), because isinstance would accept a proxy.
        if issubclass(type(old), kind) and not issubclass(type(new), kind):
            return f"the factory returned a {type(new).__name__} in the place of a {name}"
    if (callable(old) and not callable(new)) or isinstance(new, (staticmethod, classmethod)):
        return f"the factory returned a {type(new).__name__}, which takes no calls in that place"
    return ""


def _refused(new: types.FunctionType, before: Mapping[str, inspect.Parameter]) -> str:
    """Which call of upstream's the code of `new` refuses, even if functools.wraps shows upstream's signature."""
    code = new.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positional = [p for p in before.values() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    required = names[: code.co_argcount - len(new.__defaults__ or ())]
    if len(positional) > code.co_argcount and not code.co_flags & inspect.CO_VARARGS:
        return f"its code takes {code.co_argcount} positional arguments; upstream's takes {len(positional)}"
    if len(required) > len(positional):
        return f"its code needs an argument {required[len(positional)]} that upstream's lacks"
    always = {p.name for p in before.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    # After the positional ones stand those that a call passes by name alone, also behind *args.
    for name in names[code.co_argcount :]:
        if name not in (new.__kwdefaults__ or {}) and name not in always:
            return f"its code needs an argument {name} by name, which calls of upstream's need not pass by name"
    for kind, flag, what in (
        (inspect.Parameter.VAR_POSITIONAL, inspect.CO_VARARGS, "any number of positional arguments"),
        (inspect.Parameter.VAR_KEYWORD, inspect.CO_VARKEYWORDS, "arguments by any name"),
    ):
        if any(p.kind is kind for p in before.values()) and not code.co_flags & flag:
            return f"its code does not take {what}, which upstream's does"
    # The first argument of a method (self, cls, ctx) is never passed by name.
    for position, parameter in list(enumerate(before.values()))[1:]:
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            taken = parameter.name in names[code.co_posonlyargcount :]
            mixed_up = position < len(required) and required[position] != parameter.name
            if mixed_up or (not taken and not code.co_flags & inspect.CO_VARKEYWORDS):
                return f"its code does not take the argument {parameter.name} by name"
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name in names[code.co_argcount :]:
                return f"its code takes the argument {parameter.name} by name alone, but calls may pass it by position"
    return ""


def _unknown(new: types.FunctionType, old: Any, before: Mapping[str, inspect.Parameter]) -> str:
    """Which argument of upstream's `new` takes by ``**kwargs`` and passes on to code that does not know it."""
    code = new.__code__
    own = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    named = [p.name for p in list(before.values())[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    named = [name for name in named if name not in own]
    if not named:
        return ""
    held = list(held_by(new, until=old))  # what that takes was asked when it was bound
    for function in held:
        known = _said_to_take(function) if type(function) is types.FunctionType else None
        unknown = [name for name in named if known is not None and name not in known]
        if unknown:
            return f"it hands the argument {unknown[0]} on to code that does not know it"
    if _said_to_take(new) is None and all(item is not old for item in held):
        return (
            f"it takes the argument {named[0]} as one of any, but has not got upstream's function to hand it on to, "
            "and does not say which arguments it knows (shim.patches._arguments.takes)"
        )
    return ""


def _differs(before: Mapping[str, inspect.Parameter], after: Mapping[str, inspect.Parameter]) -> str:
    """How a signature differs from upstream's; "" if it does in optional parameters alone that a backport adds."""
    positional = [name for name, p in before.items() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    if list(after)[: len(positional)] != positional or not set(before) <= set(after):
        return f"its parameters are {', '.join(after)}; upstream's are {', '.join(before)}"
    for name, parameter in after.items():
        if name not in before:
            if parameter.default is parameter.empty:
                return f"parameter {name} is added without a default"
        # By identity: a default may be a tensor, whose == gives no bool.
        elif parameter.kind is not before[name].kind or parameter.default is not before[name].default:
            return f"parameter {name} is not as upstream has it"
    return ""


def misfit(new: Any, old: Any) -> str:
    """Why `new` cannot replace `old`; "" if it can. A backport may add optional parameters."""
    problem = _wrong_kind(new, old)
    if problem or not callable(old):
        return problem
    attributes = getattr(new, "__dict__", {})
    shows_olds = attributes.get("__wrapped__") is old and "__signature__" not in attributes  # by functools.wraps
    try:
        before = inspect.signature(old).parameters
        problem = "" if shows_olds else _differs(before, inspect.signature(new).parameters)
    except (TypeError, ValueError):
        return ""  # built-in functions have no signature
    if problem or type(new) is not types.FunctionType:
        return problem
    return _refused(new, before) or _unknown(new, old, before)


# The factories


class _Entry(NamedTuple):
    """What a patch holds, and the layers it came with. content: see Decision."""

    patch: str
    content: str
    layers: Mapping[str, Layer]
    resource: Resource


class Factories:
    """Factories by what they were made from (Decision.content). Fields are read and changed under the engine's lock.

    Patch modules are imported without the lock, because an import may wait for another thread. So two threads may load
    the factories of one patch at once. The later factories count, and what the earlier ones hold ends.
    """

    def __init__(self, lock: Callable[[], threading.RLock]) -> None:
        """lock: gives the engine's lock, which a forked process replaces."""
        self._lock = lock
        self._made: dict[str, Mapping[str, Layer]] = {}
        self._resources: list[_Entry] = []  # of the factories in `_made`, and of dropped ones that could not end yet
        self._thread = threading.local()

    @property
    def loading(self) -> bool:
        """Whether this thread is importing a patch module. Imports inside it then load no further patch modules."""
        return getattr(self._thread, "loading", False)

    def missing(self, plan: Plan, but: Collection[str], ran: frozenset[str]) -> Iterator[Decision]:
        """The patches that are needed now and whose factories are not loaded.

        but: ids that are not needed.    ran: the modules of the plan that have run to the end.
        """
        for decision, modules in plan.wanted:
            if not ran.isdisjoint(modules) and decision.content not in self._made and decision.id not in but:
                yield decision

    def load(self, plan: Plan, but: Collection[str], ran: frozenset[str]) -> set[str]:
        """Import the patch modules that are needed now. Called without the lock. BindError names the failing patch.

        Returns the ids of patches that must wait: this call runs inside the import of their module, which imports a
        target. The import of that module binds the patch in the end.
        """
        postponed = set()
        for decision in self.missing(plan, but, ran):
            entry = plan.matrix.patches[decision.id]
            outer, self._thread.loading = self.loading, True
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
                self._thread.loading = outer
            if set(factories) != {*decision.targets, *decision.dropped}:
                odd = ", ".join(sorted(set(factories) ^ {*decision.targets, *decision.dropped}))
                what = f"matrix and {entry.module} disagree about the targets of {decision.variant}: {odd}"
                raise BindError(f"{decision.id}: {what}", decision.id)
            content = decision.content
            layers = {t: Layer(decision.id, t, factories[t], decision.wiring, content) for t in decision.targets}
            with self._lock():
                self._made[content] = layers
                held = getattr(made, "resources", ())
                self._resources += [_Entry(decision.id, content, layers, resource) for resource in held]
        return postponed

    def layers(self, plan: Plan | None, but: Collection[str]) -> dict[str, tuple[Layer, ...]]:
        """Target -> layers, innermost first, in the order of the plan, which is that of the matrix."""
        wanted: dict[str, tuple[Layer, ...]] = {}
        for decision, _ in () if plan is None else plan.wanted:
            made = self._made.get(decision.content)
            if decision.id in but or made is None:
                continue
            if not decision.skipped and wanted.keys().isdisjoint(made):  # as of most
                wanted.update(zip(made, zip(made.values())))
                continue
            for target in (target for target in made if target not in decision.skipped):
                wanted[target] = (*wanted.get(target, ()), made[target])
        return wanted

    def keep_only(self, plan: Plan | None, but: Collection[str]) -> None:
        """Drop the factories of patches that are not applied, so that objects which only they reference are freed."""
        needed = set() if plan is None else {d.content for d, _ in plan.wanted if d.id not in but}
        self._made = {content: layers for content, layers in self._made.items() if content in needed}

    # What patches hold besides functions

    def begin(self, plan: Plan, but: Collection[str], name: str, module: ModuleType) -> None:
        """Call each `begin` for the module `name`, of patches whose factories are loaded. Called without the lock."""
        patches = plan.matrix.patches
        wanted = [d for d, _ in plan.wanted if d.id not in but and name in patches[d.id].before]
        contents = {decision.content for decision in wanted}
        with self._lock():
            entries = [entry for entry in self._resources if entry.content in contents]
        for entry in entries:
            if entry.resource.begin is not None:
                entry.resource.begin(module)

    def release_dropped(self) -> list[str]:
        """Free what a patch holds once its factories were dropped. Called without the lock: a patch may have its own.

        A resource that is still in use and cannot end yet is tried again at the next call. Returns what went wrong: an
        error of one patch must not keep others from being freed.
        """
        problems: list[str] = []
        with self._lock():
            over = [entry for entry in self._resources if self._made.get(entry.content) is not entry.layers]
        for entry in over:
            if entry.resource.release is not None:
                try:
                    entry.resource.release()
                except Exception as error:  # noqa: BLE001 - it is a warning, see above
                    what = f"{type(error).__name__}: {error}"
                    problems.append(f"{entry.patch} could not release its resource: {what}")
        ended = {id(entry) for entry in over if not _told(entry.resource)}
        with self._lock():
            self._resources = [entry for entry in self._resources if id(entry) not in ended]
        return problems

    def resources(self) -> Iterator[tuple[str, str]]:
        """Pairs of a patch and what it holds now, in words. Called without the lock."""
        with self._lock():
            entries = list(self._resources)
        for entry in entries:
            text = _told(entry.resource)
            if text:
                yield entry.patch, text


def _told(resource: Resource) -> str:
    try:
        return resource.tells()
    except Exception as error:  # noqa: BLE001 - status() reports the error instead
        return f"something that cannot be told: {type(error).__name__}: {error}"
