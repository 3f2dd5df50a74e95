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
    position, default = _position(function, parameters, name), parameters[name].default
    if default is inspect.Parameter.empty:
        default = None

    def get(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return args[position] if len(args) > position else kwargs.get(name, default)

    return get


def replacing(
    function: Function, name: str, like: Function | None = None
) -> Callable[[tuple[Any, ...], dict[str, Any], Any], tuple[tuple[Any, ...], dict[str, Any]]]:
    """A function that returns the arguments of a call of `function` with another value for `name`.

    like: see `argument`. Without it a wrapper that takes any gets the value by name, as its calls are to pass it.
    """
    parameters = _parameters(function, name, like)
    unknown = name not in parameters and takes_any(parameters)
    position = sys.maxsize if unknown else _position(function, parameters, name)

    def put(args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(args) > position:
            return (*args[:position], value, *args[position + 1 :]), kwargs
        return args, {**kwargs, name: value}

    return put


def by_name(function: Function) -> Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, Any]]:
    """A function that gives all arguments of a call of `function` by name. `function` takes no *args.

    Raises TypeError as `function` does: if a call has too many arguments by position, or one of them twice.
    """
    names = _by_position(parameters_of(function))

    def named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if len(args) > len(names):
            raise TypeError(f"{function.__name__}() takes {len(names)} positional arguments; {len(args)} were given")
        given = dict(zip(names, args, strict=False))
        twice = [name for name in given if name in kwargs]
        if twice:
            raise TypeError(f"{function.__name__}() got multiple values for argument '{twice[0]}'")
        return {**given, **kwargs}

    return named


def parameters_of(function: Function) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function by name. An object that does not say them takes any."""
    try:
        return inspect.signature(function).parameters
    except ValueError:  # of a descriptor that can be called, say
        return inspect.signature(lambda *args, **kwargs: None).parameters


def takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a function with these parameters takes arguments of any name."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _by_position(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """The parameters that a call may pass by position."""
    return [name for name, parameter in parameters.items() if parameter.kind <= parameter.POSITIONAL_OR_KEYWORD]


def _position(function: Function, parameters: Mapping[str, inspect.Parameter], name: str) -> int:
    """The place at which a call may pass the argument `name`; of one that it passes by name alone, beyond all places.

    One that stands behind *args is of that kind, however many arguments a call has.
    """
    places = _by_position(parameters)
    if name in places:
        return places.index(name)
    if name not in parameters or parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY:
        raise ValueError(f"{name} is no argument of {getattr(function, '__qualname__', function)}")
    return sys.maxsize


def _parameters(function: Function, name: str, like: Function | None) -> Mapping[str, inspect.Parameter]:
    parameters = parameters_of(function)
    if like is None or name in parameters or not takes_any(parameters):
        return parameters
    return inspect.signature(like).parameters


def add_parameters(wrapper: Any, original: Function, *names: str) -> None:
    """Give the wrapper upstream's signature, with added parameters of a later release at the end.

    Where upstream's end with *args, **kwargs or those that are passed by name alone, the added ones are, too.
    """
    signature = inspect.signature(original)
    known = list(signature.parameters.values())
    plain = all(parameter.kind <= parameter.POSITIONAL_OR_KEYWORD for parameter in known)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if plain else inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, kind, default=None) for name in names if name not in signature.parameters]
    rest = [known.pop()] if takes_any(signature.parameters) else []
    wrapper.__signature__ = signature.replace(parameters=[*known, *added, *rest])


def takes(wrapper: Any, names: Iterable[str]) -> None:
    """Declare which arguments `wrapper` handles, for a wrapper that takes any.

    Needed for a wrapper that passes its arguments to another function than the one it replaces. The engine refuses the
    wrapper if the replaced function has other arguments.
    """
    # Stored with the code object, because functools.wraps copies attributes to wrappers of the wrapper.
    wrapper._shim_takes = (wrapper.__code__, frozenset(names))
