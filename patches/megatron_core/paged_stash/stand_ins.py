"""Stand-ins: modules of upstream that run although a package they import at top level is missing.

The key `before` of patch.yaml names the modules. If the package cannot be imported, each of them runs with separate
builtins, whose `__import__` returns an inert object for the package. No other module sees the object: sys.modules gets
no entry, so a guard ``try: import package`` still fails. If the package can be imported, the modules do not change.

After revert() the modules stay imported, because without the package there is no earlier state. Names from the stand-in
stay, also in functions that the module has defined, which find the stand-in in their own imports too. Only the module's
builtins are restored, so that a reload fails as it does upstream. The stand-in does not cover importlib.import_module,
nor any other way to ask for the package than an import statement.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

from shim._errors import StandInError
from shim._resources import Resource

__all__ = ["StandIns"]


def _is_missing(package: str) -> bool:
    """Whether no finder knows the top-level package. A broken package is not missing."""
    if package in sys.modules:
        return sys.modules[package] is None  # None forbids the import
    try:
        return importlib.util.find_spec(package) is None
    except ImportError:  # a finder forbids the package; an import fails in the same way
        return True


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


def _namespace(module: ModuleType) -> dict[str, Any]:
    """The dictionary of a module. Its attribute `__dict__` would load a lazy module."""
    found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return found


class StandIns:
    """The stand-in for one package, and the modules that run with it now.

    Each call of the patch's `bindings` has a user of it: the modules keep it until the last user has gone. It needs no
    lock: `_give` looks for its user after it has written, and whoever removes a user withdraws what is there.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._inert = _Inert(package, package)
        self._users: set[object] = set()
        # Modules that run with shim's builtins, and those builtins.
        self._given: weakref.WeakKeyDictionary[ModuleType, dict[str, Any]] = weakref.WeakKeyDictionary()

    def resource(self) -> Resource:
        user = object()
        self._users.add(user)
        return Resource(lambda: "", functools.partial(self._leave, user), functools.partial(self._give, user))

    def _give(self, user: object, module: ModuleType) -> None:
        """Let a module whose code is about to run find a stand-in, if the package is missing."""
        namespace = _namespace(module)
        if _is_missing(self._package):
            # The module's code and its functions use these builtins. Anything but a dict would make name lookup slow.
            self._given[module] = given = {**vars(builtins), "__import__": self._import}
            namespace["__builtins__"] = given
        elif module in self._given:
            self._withdraw(module)  # a reload, and the package exists by now
        if user not in self._users:  # reverted meanwhile
            self._leave(user)

    def _leave(self, user: object) -> None:
        self._users.discard(user)
        for module in () if self._users else list(self._given):
            self._withdraw(module)

    def _withdraw(self, module: ModuleType) -> None:
        namespace = _namespace(module)
        if namespace.get("__builtins__") is self._given.get(module):
            namespace["__builtins__"] = vars(builtins)
        self._given.pop(module, None)  # last: who is interrupted before has it done again

    def _import(
        self,
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
            if level or package != self._package or (error.name or "").partition(".")[0] != package:
                raise
            # The package may have been installed since. The names of a star import are unknown.
            if not _is_missing(package) or "*" in (fromlist or ()):
                raise
        return functools.reduce(getattr, name.split(".")[1:], self._inert) if fromlist else self._inert
