"""Read and replace arguments of upstream functions by name, however a call passes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Function = Callable[..., Any]


def argument(function: Function, name: str) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any]:
    """A getter for the argument `name` of a call of `function`, or its default if the call does not pass it."""
    parameters = inspect.signature(function).parameters
    position, default = list(parameters).index(name), parameters[name].default
    if default is inspect.Parameter.empty:
        default = None

    def get(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return args[position] if len(args) > position else kwargs.get(name, default)

    return get


def replacing(function: Function, name: str) -> Callable[[tuple[Any, ...], dict[str, Any], Any], tuple]:
    """A function that returns the arguments of a call of `function` with another value for `name`."""
    position = list(inspect.signature(function).parameters).index(name)

    def put(args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(args) > position:
            return (*args[:position], value, *args[position + 1 :]), kwargs
        return args, {**kwargs, name: value}

    return put


def add_parameters(wrapper: Any, original: Function, *names: str) -> None:
    """Give the wrapper upstream's signature, with added parameters of a later release at the end."""
    signature = inspect.signature(original)
    added = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        for name in names
        if name not in signature.parameters
    ]
    wrapper.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])


def takes(wrapper: Any, names: Iterable[str]) -> None:
    """Declare which arguments `wrapper` handles, for a wrapper that takes any.

    Needed for a wrapper that passes its arguments to another function than the one it replaces. The engine refuses the
    wrapper if the replaced function has other arguments.
    """
    # Stored with the code object, because functools.wraps copies attributes to wrappers of the wrapper.
    wrapper._shim_takes = (wrapper.__code__, frozenset(names))
