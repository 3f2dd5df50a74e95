"""The arguments of `apply` and of everything that takes the same: spelled once, and checked."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict, TypeVar, cast

from shim._errors import OptionError
from shim._matrix.model import KINDS
from shim._matrix.spelling import one_of
from shim._record import record

__all__ = [
    "NONE",
    "ON_DRIFT",
    "PREFIX",
    "SAID",
    "Arguments",
    "Given",
    "Ids",
    "PatchOptions",
    "Unset",
    "checked_choice",
    "checked_flag",
    "checked_kinds",
    "is_true",
    "mapping_of_mappings",
    "path_of",
    "takes_arguments",
    "words_of",
]

ON_DRIFT = ("skip", "error", "apply", "known")
PREFIX = "MEGATRON_SHIM_"
# Set below `shim run` by the process that has said the line of a job, for those that it starts.
SAID = PREFIX + "SAID"
TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
NONE = "none"  # the value for an empty list. An empty variable counts as unset.

Ids = Iterable[str] | str
PatchOptions = Mapping[str, Mapping[str, Any]]

F = TypeVar("F", bound=Callable[..., Any])


class Unset:
    """Stands for an argument that was not given, so that its variable counts. Its repr shows the default of both."""

    def __init__(self, name: str, default: Any) -> None:
        self.variable, self.default = PREFIX + name, default

    def __repr__(self) -> str:
        return f"{self.default!r} (or {self.variable})"


class Given(TypedDict, total=False):
    """The arguments that `apply`, and all that share them (takes_arguments), can be given by name."""

    only: Ids | None
    exclude: Ids
    require: Ids
    kinds: Ids | None
    strict: bool
    on_drift: str
    options: PatchOptions | None
    packages: Ids
    matrix: str | os.PathLike[str] | None
    lock: str | os.PathLike[str] | None


@record
class Arguments:
    """The arguments of `apply` as they were given. An Unset stands for one that was not, and has a variable."""

    only: Any = Unset("ONLY", None)
    exclude: Any = ()
    require: Any = Unset("REQUIRE", ())
    kinds: Any = Unset("KINDS", None)
    strict: Any = Unset("STRICT", False)
    on_drift: Any = Unset("ON_DRIFT", "skip")
    options: Any = Unset("OPTIONS", None)
    packages: Any = ()
    matrix: Any = Unset("MATRIX", None)
    lock: Any = Unset("LOCK", None)

    @property
    def package_names(self) -> tuple[str, ...]:
        """`packages`, checked. OptionError for a name that cannot be a package."""
        names = words_of("packages", self.packages)
        for name in names:
            if not all(part.isidentifier() for part in name.split(".")):
                raise OptionError(f"packages names {name!r}, which is not the name of a package")
        return names

    def variables(self) -> dict[str, str]:
        """The MEGATRON_SHIM_ variables that mean the same to another process as these arguments do here.

        An argument that was given with its default value becomes an empty variable, which overrides a variable of the
        other process. `packages` has no variable. OptionError if no matrix could make an argument usable.
        """
        found: dict[str, str] = {}
        for name in ("only", "kinds", "require"):
            given = getattr(self, name)
            if not isinstance(given, Unset):
                # No kinds and no patches differ from all kinds and all patches. No requirements need no word.
                empty = "" if given is None or name == "require" else NONE
                found[name] = ",".join(words_of(name, () if given is None else given)) or empty
        if words := words_of("exclude", self.exclude):
            found["exclude"] = ",".join(words)
        if not isinstance(self.strict, Unset):
            found["strict"] = "1" if checked_flag(self.strict) else "0"
        if not isinstance(self.on_drift, Unset):
            found["on_drift"] = checked_choice("on_drift", self.on_drift, ON_DRIFT)
        if not isinstance(self.options, Unset):
            found["options"] = _as_json(self.options)
        for name in ("matrix", "lock"):
            given = getattr(self, name)
            if not isinstance(given, Unset):
                found[name] = os.path.abspath(path_of(name, given)) if given is not None else ""
        checked_kinds(self.kinds if not isinstance(self.kinds, Unset) else None)
        return {PREFIX + name.upper(): value for name, value in found.items()}


def takes_arguments(function: F) -> F:
    """Let a function with ``**given: Unpack[Given]`` look to `inspect` and help() as if it spelled every argument."""
    signature = inspect.signature(function)
    types = {name: getattr(found, "__forward_arg__", found) for name, found in Given.__annotations__.items()}
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    shown = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
        for name, default in vars(Arguments()).items()
    ]
    known = {parameter.name for parameter in (*own, *shown)}

    @functools.wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        for name in given.keys() - known:
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}")
        return function(*args, **given)

    vars(checked)["__signature__"] = signature.replace(parameters=[*own, *shown])
    checked.__annotations__ = {
        **{parameter.name: parameter.annotation for parameter in (*own, *shown)},
        "return": signature.return_annotation,
    }
    return cast("F", checked)


def words_of(what: str, given: Ids) -> tuple[str, ...]:
    """Names from a list, or from one text with commas or spaces between the names."""
    items = [given] if isinstance(given, str) else given
    if isinstance(items, (bytes, bytearray)) or not isinstance(items, Iterable):
        raise OptionError(f"{what} is {given!r}; it must be a list of names, or text with commas between them")
    found: list[str] = []
    for item in items:
        if not isinstance(item, str):
            raise OptionError(f"{what} names {item!r}, which is not text")
        found += item.replace(",", " ").split()
    return tuple(dict.fromkeys(found))


def is_true(name: str, text: str) -> bool:
    """Whether the text of a variable means true. OptionError if it means neither true nor false."""
    word = text.strip().lower()
    if word in TRUE or word in FALSE:
        return word in TRUE
    raise OptionError(f"{name}={text!r} is neither true nor false; use 1 or 0")


def checked_flag(strict: Any) -> bool:
    if not isinstance(strict, bool):  # to Python, the text "false" is true
        raise OptionError(f"strict is {strict!r}; it must be True or False")
    return strict


def checked_choice(what: str, value: Any, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise OptionError(f"{what} is {value!r}; it must be {one_of(value, choices)}")
    return value


def checked_kinds(given: Ids | None, what: str = "kinds") -> frozenset[str] | None:
    if given is None:
        return None
    words = words_of(what, given)
    for kind in words:
        if kind not in KINDS:
            raise OptionError(f"{what} names {kind!r}; it must be {one_of(kind, KINDS)}")
    return frozenset(words)


def path_of(what: str, given: Any) -> str:
    try:
        return os.fsdecode(given)
    except TypeError:
        raise OptionError(f"{what} is {given!r}; it must be a path") from None


def _as_json(given: PatchOptions | None) -> str:
    plain = mapping_of_mappings("options", given)
    try:
        text = json.dumps(plain, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"options cannot travel to another process: {error}") from None
    return text if plain else ""


def mapping_of_mappings(what: str, given: Any) -> dict[str, dict[str, Any]]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise OptionError(f"{what} is {given!r}; it must be {{patch id: {{option: value}}}}")
    for id, values in given.items():
        if not isinstance(values, Mapping):
            raise OptionError(f"{what} of {id} is {values!r}; it must be {{option: value}}")
    return {id: dict(values) for id, values in given.items()}
