"""Whether a factory's result can replace upstream's object: the same kind, and every call that upstream's takes."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any

from shim._engine.reach import held_by

__all__ = ["misfit"]

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
    held = list(held_by(new))
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


def misfit(new: Any, old: Any) -> str:
    """Why `new` cannot replace `old`; "" if it can. A backport may add optional parameters."""
    problem = _wrong_kind(new, old)
    if problem or not callable(old):
        return problem
    try:
        before, after = inspect.signature(old).parameters, inspect.signature(new).parameters
    except (TypeError, ValueError):
        return ""  # built-in functions have no signature
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
    if type(new) is not types.FunctionType:
        return ""
    return _refused(new, before) or _unknown(new, old, before)
