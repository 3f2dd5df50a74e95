"""Stand-ins: modules of upstream that run although a package they import at top level is missing.

A patch names the package and the modules (key `stand_ins` of the matrix). If the package cannot be imported, each of
the modules runs with separate builtins, whose `__import__` returns an inert object for the package. No other module
sees the object: sys.modules gets no entry, so a guard ``try: import package`` still fails. If the package can be
imported, the modules do not change.

After revert() the modules stay imported, because without the package there is no earlier state. Names from the stand-in
stay, also in functions that the module has defined, which find the stand-in in their own imports too. Only the module's
builtins are restored, so that a reload fails as it does upstream. The stand-in does not cover importlib.import_module,
nor any other way to ask for the package than an import statement.
"""

from __future__ import annotations

import builtins
import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

from shim._engine.aliases import namespace_of
from shim._errors import StandInError
from shim._planning.plan import Plan
from shim._releases.sources import find_spec

__all__ = ["StandIns", "is_missing", "stand_ins_of"]


def is_missing(package: str) -> bool:
    """Whether no finder knows the top-level package. A broken package is not missing."""
    if package in sys.modules:
        return sys.modules[package] is None  # None forbids the import
    return find_spec(package, everyone=True) is None


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _Inert:
    """Stands for a missing package and for everything read from it: its names, calls and items are inert too.

    It works as a decorator, an annotation or a constant. An operation that needs its value raises StandInError.
    """

    __name__ = __package__ = ""  # copy and pickle read attributes before they fill an instance

    def __init__(self, package: str, name: str) -> None:
        self.__name__ = name
        self.__package__ = package

    def __getattr__(self, name: str) -> _Inert:
        # copy, inspect.unwrap and torch look for protocols, and must find none.
        if _is_dunder(name):
            raise AttributeError(f"{self!r} has no {name}")
        # Stored, so that a constant is the same object at each read.
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

    # Else a program would go on with a value that is none: bool() is True by default, and items allow iteration.
    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __contains__ = __enter__ = __exit__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse


class _Decorated:
    """A function decorated by a missing package. It has the function's name, and a call raises."""

    __package__ = ""  # see _Inert

    def __init__(self, function: Callable[..., Any], decorator: _Inert) -> None:
        functools.update_wrapper(self, function)
        self.__package__ = decorator.__package__

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _unusable(self._name, self.__package__)

    def __getitem__(self, grid: Any) -> _Decorated:
        return self  # kernel[grid] is no call yet

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


def stand_ins_of(plan: Plan | None) -> dict[str, frozenset[str]]:
    """The modules that may run without some packages, and these packages."""
    packages: dict[str, frozenset[str]] = {}
    for decision in () if plan is None else plan.decisions.values():
        for entry in plan.matrix.patches[decision.id].stand_ins if plan is not None and decision.wanted else ():
            packages.update((m, packages.get(m, frozenset()) | {entry.package}) for m in entry.modules)
    return packages


class StandIns:
    """Which modules may run without which packages, and which modules run so now."""

    def __init__(self) -> None:
        self._packages: Mapping[str, frozenset[str]] = {}  # module -> packages
        self._tops: dict[str, _Inert] = {}  # package -> its stand-in
        # Modules that run with shim's builtins, and those builtins.
        self._given: weakref.WeakKeyDictionary[ModuleType, dict[str, Any]] = weakref.WeakKeyDictionary()

    def sync(self, plan: Plan | None) -> None:
        """Take the stand-ins of the plan, and restore the builtins of modules that the plan no longer names."""
        self._packages = stand_ins_of(plan)
        for module in list(self._given):
            if namespace_of(module).get("__name__") not in self._packages:
                self._withdraw(module)

    def missing(self, module: str) -> frozenset[str]:
        """The missing packages that need a stand-in in `module`. Asks finders, so no lock may be held."""
        return frozenset(package for package in self._packages.get(module, ()) if is_missing(package))

    def give(self, module: ModuleType, missing: frozenset[str]) -> None:
        """Let a module whose code is about to run find a stand-in for each missing package."""
        namespace: Any = namespace_of(module)
        missing &= self._packages.get(namespace["__name__"], frozenset())  # the plan may have changed meanwhile
        if missing:
            # The module's code and its functions use these builtins. Anything but a dict would make name lookup slow.
            namespace["__builtins__"] = given = {**vars(builtins), "__import__": self._importer(missing)}
            self._given[module] = given
        elif module in self._given:
            self._withdraw(module)  # a reload, and the package exists by now

    def _withdraw(self, module: ModuleType) -> None:
        namespace: Any = namespace_of(module)
        if namespace.get("__builtins__") is self._given.get(module):
            namespace["__builtins__"] = vars(builtins)
        self._given.pop(module, None)  # last: who is interrupted before has it done again

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
                # The package may have been installed since. The names of a star import are unknown.
                if not is_missing(package) or "*" in (fromlist or ()):
                    raise
            top = self._tops.setdefault(package, _Inert(package, package))
            return functools.reduce(getattr, name.split(".")[1:], top) if fromlist else top

        return import_or_stand_in
