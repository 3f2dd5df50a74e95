"""Arguments of upstream functions, read and replaced by name, however a call passes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Function = Callable[..., Any]


def argument(function: Function, name: str) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any]:
    """A getter for the argument `name` of a call of `function`, however it was passed; its default where it was not."""
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
    """Give the wrapper upstream's signature and, behind it, parameters that a later release has."""
    signature = inspect.signature(original)
    added = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        for name in names
        if name not in signature.parameters
    ]
    wrapper.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])


def takes(wrapper: Any, names: Iterable[str]) -> None:
    """Say which arguments the code of `wrapper`, a function that takes any, knows what to do with.

    For one that hands them on to something else than the function in whose place it stands: the engine refuses it
    where that function has others.
    """
    # With the code it is said of, because functools.wraps hands attributes on to wrappers of the wrapper.
    wrapper._shim_takes = (wrapper.__code__, frozenset(names))
