"""Whether what a factory returned can stand in for upstream's object: the same kind, and every call it took."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any

__all__ = ["misfit"]


def _wrong_kind(new: Any, old: Any) -> str:
    """Why `new` is not the kind of thing `old` is: real functions, classes and properties only, no proxies."""
    for kind, name in ((types.FunctionType, "function"), (type, "class"), (property, "property")):
        if isinstance(old, kind) and not isinstance(new, kind):
            return f"the factory returned a {type(new).__name__} in the place of a {name}"
    if (callable(old) and not callable(new)) or isinstance(new, (staticmethod, classmethod)):
        return f"the factory returned a {type(new).__name__}, which takes no calls in that place"
    return ""


def _refused(new: types.FunctionType, before: Mapping[str, inspect.Parameter]) -> str:
    """Which call in upstream's parameters the code of `new` does not take, whatever functools.wraps lets it show."""
    code = new.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positional = [p for p in before.values() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    required = names[: code.co_argcount - len(new.__defaults__ or ())]
    if len(positional) > code.co_argcount and not code.co_flags & inspect.CO_VARARGS:
        return f"its code takes {code.co_argcount} positional arguments; upstream's takes {len(positional)}"
    if len(required) > len(positional):
        return f"its code needs an argument {required[len(positional)]} that upstream's has not"
    # The first of a method (self, cls, ctx) is never given by name.
    for position, parameter in list(enumerate(before.values()))[1:]:
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            taken = parameter.name in names[code.co_posonlyargcount :]
            mixed_up = position < len(required) and required[position] != parameter.name
            if mixed_up or (not taken and not code.co_flags & inspect.CO_VARKEYWORDS):
                return f"its code does not take the argument {parameter.name} by name"
    return ""


def misfit(new: Any, old: Any) -> str:
    """Why `new` cannot stand in for `old`; "" where it can. A backport may add optional parameters."""
    problem = _wrong_kind(new, old)
    if problem or not callable(old):
        return problem
    try:
        before, after = inspect.signature(old).parameters, inspect.signature(new).parameters
    except (TypeError, ValueError):
        return ""  # built-in functions have none
    positional = [name for name, p in before.items() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    if list(after)[: len(positional)] != positional or not set(before) <= set(after):
        return f"its parameters are {', '.join(after)}; upstream's are {', '.join(before)}"
    for name, parameter in after.items():
        if name not in before:
            if parameter.default is parameter.empty:
                return f"parameter {name} is added without a default"
        # By identity: a default may be a tensor, which has no plain equality.
        elif parameter.kind is not before[name].kind or parameter.default is not before[name].default:
            return f"parameter {name} is not as upstream has it"
    return _refused(new, before) if isinstance(new, types.FunctionType) else ""
