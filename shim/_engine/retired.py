"""Functions of shim's that are no longer in force do what the function beneath them does.

Other code may put such a function back on a name after revert(): a patch manager that kept it, or a test that
restores what it saved. So its code is exchanged for code that passes every call on. While a function is in force, it
has its own code, and nothing comes between.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shim._engine.chain import MISSING
from shim._engine.switch import Write

__all__ = ["Retired", "can_pass_on"]

_BENEATH = "_shim_beneath"  # the name of the argument by which the code gets the function beneath


class _Own(NamedTuple):
    """What a function had before its code was exchanged. signature: MISSING if it had none."""

    code: types.CodeType
    defaults: tuple[Any, ...] | None
    named: dict[str, Any] | None
    signature: Any


class Retired:
    """The functions whose code is exchanged, as weak references, with what they had before."""

    def __init__(self) -> None:
        self._own: weakref.WeakKeyDictionary[Any, _Own] = weakref.WeakKeyDictionary()

    def __contains__(self, function: Any) -> bool:
        own = self._own.get(function) if type(function) is types.FunctionType else None
        return own is not None and function.__code__ is not own.code

    def retiring(self, top: Any, base: Any) -> Iterator[Write]:
        """What lets `top` pass its calls on to `base`. Nothing for a class, which cannot, or if there is no base.

        The two of a property are its functions.
        """
        for function, beneath in _pairs(top, base):
            if function not in self:
                yield from self._exchange(function, beneath)

    def reviving(self, top: Any) -> Iterator[Write]:
        """What gives `top` its own code back: a factory has returned a function again that it returned before."""
        for function in _functions(top):
            if function in self:
                own = self._own[function]
                yield Write(function, "__defaults__", function.__defaults__, own.defaults)
                yield Write(function, "__kwdefaults__", function.__kwdefaults__, own.named)
                yield Write(function, "__code__", function.__code__, own.code)
                yield Write(function, "__signature__", _signature_of(function), own.signature)

    def _exchange(self, function: types.FunctionType, beneath: Callable[..., Any]) -> Iterator[Write]:
        code, named, given = function.__code__, function.__kwdefaults__, _signature_of(function)
        self._own[function] = _Own(code, function.__defaults__, named, given)
        if given is MISSING and "__wrapped__" not in vars(function):
            yield Write(function, "__signature__", MISSING, inspect.signature(function))
        passing = _passing(len(code.co_freevars)).replace(co_name=code.co_name)
        yield Write(function, "__kwdefaults__", named, {**(named or {}), _BENEATH: beneath})
        yield Write(function, "__code__", code, passing)
        yield Write(function, "__defaults__", function.__defaults__, None)


def _signature_of(function: types.FunctionType) -> Any:
    return vars(function).get("__signature__", MISSING)


def can_pass_on(top: Any, base: Any) -> bool:
    """Whether the code of `top` can be exchanged for code that passes calls on to `base`."""
    return any(True for _ in _pairs(top, base))


def _functions(top: Any) -> list[types.FunctionType]:
    parts = (top.fget, top.fset, top.fdel) if type(top) is property else (top,)
    return [part for part in parts if type(part) is types.FunctionType]


def _pairs(top: Any, base: Any) -> Iterator[tuple[types.FunctionType, Callable[..., Any]]]:
    """The functions of `top`, each with what is beneath it. None if one of them has nothing beneath it."""
    both: list[tuple[Any, Any]] = [(top, base)]
    if type(top) is property and type(base) is property:
        both = [(top.fget, base.fget), (top.fset, base.fset), (top.fdel, base.fdel)]
    # A factory may return what it got, if there is nothing to do: that is upstream's, and stays as it is.
    both = [(new, old) for new, old in both if new is not old]
    if all(type(new) is types.FunctionType and callable(old) for new, old in both):
        yield from both


@functools.cache
def _passing(cells: int) -> types.CodeType:
    """Code with this many free variables: a function takes no other than its own code had. None of them is read."""
    names = ", ".join(f"cell_{number}" for number in range(cells))
    source = (
        f"def holder({names}):\n"
        f"    def passing(*args, {_BENEATH}, **kwargs):\n"
        f"        return {_BENEATH}(*args, **kwargs)\n"
        f"        ({names}{',' if names else ''})\n"
        "    return passing\n"
    )
    namespace: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), namespace)
    code: types.CodeType = namespace["holder"](*[None] * cells).__code__
    return code
