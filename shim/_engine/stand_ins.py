"""Modules of upstream that may be imported although a package they import at top level is missing.

A patch names the package and those modules (key `stand_ins` of the matrix). Where the package cannot be imported, each
of them runs with builtins of its own, whose `__import__` gives it an inert object in the place of the package. No other
module sees that: nothing is put into sys.modules, so that whoever guards with ``try: import package`` still finds it
missing. Where the package can be imported, the modules are not touched.

After revert() the modules stay imported: without the package there is nothing to go back to. What they took from the
stand-in they keep, and so do functions they had defined by then, which find it also in imports of their own. Only the
module's ordinary builtins are put back, so that a reload fails as it does upstream. Out of reach is
importlib.import_module, and what asks for the package by other ways than an import statement.
"""

from __future__ import annotations

import builtins
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

from shim._engine.aliases import namespace_of
from shim._errors import StandInError
from shim._planning.plan import Plan
from shim._releases.sources import find_spec

__all__ = ["StandIns", "is_missing"]


def is_missing(package: str) -> bool:
    """Whether there is no such top-level package; a broken one is there. Asks all finders, as its import would."""
    if package in sys.modules:
        return sys.modules[package] is None  # which forbids its import
    return find_spec(package, everyone=True) is None


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _Inert:
    """Stands for a missing package, or for whatever is read from it: names, calls and items of it are inert too.

    It can be a decorator, an annotation or a constant. What would need its value raises StandInError.
    """

    __name__ = __package__ = ""  # of one that copy or pickle is about to fill: they ask it for protocols first

    def __init__(self, package: str, name: str) -> None:
        self.__name__ = name
        self.__package__ = package

    def __getattr__(self, name: str) -> _Inert:
        # Whoever looks for a protocol (copy, inspect.unwrap, torch) must find that there is none.
        if _is_dunder(name):
            raise AttributeError(f"{self!r} has no {name}")
        # Kept, so that a constant is the same object wherever it is read.
        inert: _Inert = self.__dict__.setdefault(name, _Inert(self.__package__, f"{self.__name__}.{name}"))
        return inert

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], _Inert):
            return _Decorated(args[0], self)
        return _Inert(self.__package__, f"{self.__name__}(...)")

    def __getitem__(self, item: Any) -> _Inert:
        return _Inert(self.__package__, f"{self.__name__}[...]")

    def __or__(self, other: Any) -> _Inert:
        return self  # as in an annotation

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<stand-in for {self.__name__}>"

    def _refuse(self, *_: Any) -> NoReturn:
        raise _unusable(self.__name__, self.__package__)

    # Else a program would go on with what is no value: truth is true by default, and items make it an iterable.
    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __contains__ = __enter__ = __exit__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse


class _Decorated:
    """What a decorator of a missing package makes of a function: named like it, and not to be called."""

    __package__ = ""  # see _Inert

    def __init__(self, function: Callable[..., Any], decorator: _Inert) -> None:
        functools.update_wrapper(self, function)
        self.__package__ = decorator.__package__

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _unusable(self._name, self.__package__)

    def __getitem__(self, grid: Any) -> _Decorated:
        return self  # kernel[grid] is still to be called

    def __getattr__(self, name: str) -> NoReturn:
        if _is_dunder(name):
            raise AttributeError(f"{self!r} has no {name}")
        raise AttributeError(f"{name}: {_unusable(self._name, self.__package__)}")

    def __repr__(self) -> str:
        return f"<{self._name}, which needs the missing package {self.__package__}>"

    @property
    def _name(self) -> str:
        own = self.__dict__
        return f"{own.get('__module__')}.{own.get('__qualname__')}"


def _unusable(name: str, package: str) -> StandInError:
    return StandInError(
        f"{name} cannot be used, because the package {package} is missing: shim only let the module that imports it be "
        f"imported. Remedy: pip install {package}, or do not use what needs it."
    )


class StandIns:
    """Which modules may run without which packages, and which of them do."""

    def __init__(self) -> None:
        self._packages: Mapping[str, frozenset[str]] = {}  # by module
        self._tops: dict[str, _Inert] = {}  # by package
        # Modules that run with builtins of ours, and those builtins.
        self._given: weakref.WeakKeyDictionary[ModuleType, dict[str, Any]] = weakref.WeakKeyDictionary()

    @property
    def modules(self) -> Iterable[str]:
        return self._packages.keys()

    def follow(self, plan: Plan | None) -> None:
        """Take over what the plan wants, and put back the builtins of modules for which it no longer wants any."""
        packages: dict[str, frozenset[str]] = {}
        for decision in () if plan is None else plan.decisions.values():
            for entry in plan.matrix.patches[decision.id].stand_ins if plan is not None and decision.wanted else ():
                packages.update((m, packages.get(m, frozenset()) | {entry.package}) for m in entry.modules)
        self._packages = packages
        for module in list(self._given):
            if namespace_of(module).get("__name__") not in packages:
                self._withdraw(module)

    def missing(self, module: str) -> frozenset[str]:
        """The packages without which a module may run and must. Asks finders, so no lock may be held."""
        return frozenset(package for package in self._packages.get(module, ()) if is_missing(package))

    def give(self, module: ModuleType, missing: frozenset[str]) -> None:
        """Have the code of a module, which is about to run, find a stand-in for each of the missing packages."""
        namespace: Any = namespace_of(module)
        missing &= self._packages.get(namespace["__name__"], frozenset())  # the plan may have changed meanwhile
        if missing:
            # What runs and is defined there takes these builtins; with anything but a dict of them it is slow.
            namespace["__builtins__"] = given = {**vars(builtins), "__import__": self._importer(missing)}
            self._given[module] = given
        elif module in self._given:
            self._withdraw(module)  # it is reloaded, and the package is there by now

    def _withdraw(self, module: ModuleType) -> None:
        given = self._given.pop(module)
        namespace: Any = namespace_of(module)
        if namespace.get("__builtins__") is given:
            namespace["__builtins__"] = vars(builtins)

    def _importer(self, missing: frozenset[str]) -> Callable[..., Any]:
        def import_or_stand_in(
            name: str,
            globals: Mapping[str, Any] | None = None,
            locals: Mapping[str, Any] | None = None,
            fromlist: Sequence[str] | None = (),
            level: int = 0,
        ) -> Any:
            try:
                return builtins.__import__(name, globals, locals, fromlist, level)
            except ModuleNotFoundError as error:
                package = name.partition(".")[0]
                if level or package not in missing or (error.name or "").partition(".")[0] != package:
                    raise
                # It may have been installed since. What a star would bring in nobody knows.
                if not is_missing(package) or "*" in (fromlist or ()):
                    raise
            top = self._tops.setdefault(package, _Inert(package, package))
            return functools.reduce(getattr, name.split(".")[1:], top) if fromlist else top

        return import_or_stand_in
