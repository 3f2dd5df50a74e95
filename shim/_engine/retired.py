"""Functions of shim's that are no longer in force do what the function beneath them does.

Somebody may put such a function back on a name after revert(): a patch manager that kept what it had found, a test that
restores what it saved. So its code is exchanged for code that passes every call on. While a function is in force, it
has its own code, and nothing comes between.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Retired"]

_BENEATH = "_shim_beneath"  # the name of the argument by which the code gets the function beneath


class Retired:
    """The functions whose code is exchanged, as weak references, with what they had before."""

    def __init__(self) -> None:
        self._before: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()

    def retire(self, top: Any, base: Any) -> bool:
        """Let `top` pass its calls on to `base`. Returns whether it does; a class cannot, and a missing base is none.

        The two of a property are its functions.
        """
        pairs = list(_pairs(top, base))
        for function, beneath in pairs:
            if function not in self._before:
                self._exchange(function, beneath)
        return bool(pairs)

    def revive(self, top: Any) -> None:
        """Give `top` its own code back: a factory has returned a function again that it returned before."""
        for function in _functions(top):
            known = self._before.pop(function, None)
            if known is not None:
                code, defaults, named, signature = known
                function.__defaults__, function.__kwdefaults__ = defaults, named
                function.__code__ = code
                if signature is None:
                    vars(function).pop("__signature__", None)

    def __contains__(self, function: Any) -> bool:
        return type(function) is types.FunctionType and function in self._before

    def _exchange(self, function: types.FunctionType, beneath: Callable[..., Any]) -> None:
        own = vars(function)
        self._before[function] = (
            function.__code__,
            function.__defaults__,
            function.__kwdefaults__,
            own.get("__signature__"),
        )
        if "__signature__" not in own and "__wrapped__" not in own:
            import inspect  # here, because an apply() alone retires nothing

            function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        # First what the new code needs, which the old one does not read: another thread may be about to call.
        function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), _BENEATH: beneath}
        code = function.__code__
        function.__code__ = _passing(len(code.co_freevars)).replace(co_name=code.co_name)
        function.__defaults__ = None


def _functions(top: Any) -> list[types.FunctionType]:
    parts = (top.fget, top.fset, top.fdel) if type(top) is property else (top,)
    return [part for part in parts if type(part) is types.FunctionType]


def _pairs(top: Any, base: Any) -> Iterator[tuple[types.FunctionType, Callable[..., Any]]]:
    """The functions of `top`, each with what is beneath it. None where one of them has nothing beneath it."""
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
