"""Read and replace arguments of upstream functions by name, however a call passes them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Function = Callable[..., Any]


def argument(
    function: Function, name: str, like: Function | None = None
) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any]:
    """A getter for the argument `name` of a call of `function`, or its default if the call does not pass it.

    like: upstream's function, whose parameters count where `function` is somebody's wrapper that takes any.
    """
    parameters = _parameters(function, name, like)
    position, default = list(parameters).index(name), parameters[name].default
    if default is inspect.Parameter.empty:
        default = None

    def get(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return args[position] if len(args) > position else kwargs.get(name, default)

    return get


def replacing(
    function: Function, name: str, like: Function | None = None
) -> Callable[[tuple[Any, ...], dict[str, Any], Any], tuple]:
    """A function that returns the arguments of a call of `function` with another value for `name`.

    like: see `argument`. Without it a wrapper that takes any gets the value by name, as its calls are to pass it.
    """
    parameters = _parameters(function, name, like)
    by_name = name not in parameters and takes_any(parameters)
    position = sys.maxsize if by_name else list(parameters).index(name)

    def put(args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(args) > position:
            return (*args[:position], value, *args[position + 1 :]), kwargs
        return args, {**kwargs, name: value}

    return put


def parameters_of(function: Function) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function by name. An object that does not say them takes any."""
    try:
        return inspect.signature(function).parameters
    except ValueError:  # of a descriptor that can be called, say
        return inspect.signature(lambda *args, **kwargs: None).parameters


def takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a function with these parameters takes arguments of any name."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _parameters(function: Function, name: str, like: Function | None) -> Mapping[str, inspect.Parameter]:
    parameters = parameters_of(function)
    if like is None or name in parameters or not takes_any(parameters):
        return parameters
    return inspect.signature(like).parameters


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
