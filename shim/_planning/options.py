"""The arguments of `apply` and of all that takes the same, joined with variables of the environment, and checked."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any, TypedDict, TypeVar, cast

from shim._errors import MatrixError, OptionError
from shim._matrix.concerns import is_word, words_named
from shim._matrix.load import load_matrix
from shim._matrix.model import KINDS, Matrix
from shim._planning.evidence import Proved
from shim._printing.printable import all_of, did_you_mean, one_of
from shim._record import record
from shim._releases.files import read_json

__all__ = [
    "PREFIX",
    "SAID",
    "VARIABLES",
    "Arguments",
    "Given",
    "Ids",
    "Options",
    "PatchOptions",
    "asked_matrix",
    "from_json",
    "is_disabled",
    "matrix_argument",
    "path_of",
    "read_concerns",
    "resolve",
    "takes_arguments",
    "unknown_variables",
    "words_of",
]

ROUNDING = "rounding"  # also the option of a patch that fixes something and, if asked, changes rounding
FLAGS = ("strict", ROUNDING)
ON_DRIFT = ("skip", "error", "apply")
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
    rounding: bool
    concerns: Ids | os.PathLike[str] | None
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
    rounding: Any = Unset("ROUNDING", False)
    concerns: Any = Unset("CONCERNS", None)
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
        for name in FLAGS:
            given = getattr(self, name)
            if not isinstance(given, Unset):
                found[name] = "1" if checked_flag(name, given) else "0"
        if not isinstance(self.concerns, Unset):
            found["concerns"] = ",".join(checked_concerns("concerns", self.concerns) or ())
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


def checked_flag(what: str, value: Any) -> bool:
    if not isinstance(value, bool):  # to Python, the text "false" is true
        raise OptionError(f"{what} is {value!r}; it must be True or False")
    return value


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


def checked_concerns(what: str, given: Ids | os.PathLike[str] | None) -> tuple[str, ...] | None:
    """The words that say what a run has, with those that they imply; of a file, all that it does not exclude."""
    return read_concerns(what, given)[0]


def read_concerns(what: str, given: Ids | os.PathLike[str] | None) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """The words of `checked_concerns`, and notes on what files among them say. OptionError for what is neither."""
    if given is None:
        return None, ()
    files, words = _files_and_words(what, given)
    if not files:
        return words_named(",".join(words), what), ()
    for file in files:
        if not os.path.isfile(file):
            raise OptionError(
                f"{what} names the file {file!r}, which is not there. Remedy: give the path of the trainer's own "
                "arguments (YAML, JSON or a script), or words with commas between, such as packed,lora,tp"
            )
    from shim._configs.trainer_config import words_of_configs  # here, because most jobs name words, or nothing

    return words_of_configs(files, ",".join(words) or None, what)


def _files_and_words(what: str, given: Ids | os.PathLike[str]) -> tuple[list[str], list[str]]:
    """A file is what has a suffix or a separator of paths, or is there and no word."""
    files: list[str] = []
    words: list[str] = []
    for item in [given] if isinstance(given, (str, os.PathLike)) else given:
        if isinstance(item, os.PathLike):
            files.append(path_of(what, item))
            continue
        whole = isinstance(item, str) and not is_word(item) and os.path.isfile(item)  # its name may have blanks
        for name in [item] if whole else words_of(what, [item]):
            is_file = whole or (not is_word(name) and (os.path.isfile(name) or bool(re.search(r"[./\\]", name))))
            (files if is_file else words).append(name)
    return files, words


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


# With the variables of the environment

VARIABLES = tuple(
    PREFIX + name
    for name in (
        "DISABLE",
        "EXCLUDE",
        "ONLY",
        "KINDS",
        "REQUIRE",
        "STRICT",
        "ROUNDING",
        "CONCERNS",
        "ON_DRIFT",
        "OPTIONS",
        "MATRIX",
        "LOCK",
    )
)
# Variables of shim.testing, those that ray_runtime_env sets for its workers, and one of `shim run` for its processes.
OTHER_VARIABLES = tuple(PREFIX + name for name in ("CACHE", "RAY_NEXT_HOOK", "RAY_PACKAGES", "SAID"))


@record
class Options:
    """Resolved options. None for `only`, `kinds` and `concerns` means all. `disabled` turns everything off.

    concerns_notes: how it is known what the run has, if `concerns` names a file.
    lock_content: what the file `lock` holds, if it was read for a plan.
    trial: patches to apply whatever their bodies are, in a process that runs proofs (evidence.trial_of).
    """

    only: frozenset[str] | None = None
    exclude: frozenset[str] = frozenset()
    require: frozenset[str] = frozenset()
    kinds: frozenset[str] | None = None
    strict: bool = False
    rounding: bool = False
    concerns: tuple[str, ...] | None = None
    on_drift: str = "skip"
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    disabled: bool = False
    lock: str | None = None
    packages: tuple[str, ...] = ()
    concerns_notes: tuple[str, ...] = field(default=(), compare=False, repr=False)
    lock_content: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    trial: Mapping[str, Proved] | None = field(default=None, compare=False, repr=False)

    def may_round(self, id: str) -> bool:
        """Whether a patch may change rounding where stock is right: it was asked for, or the patch by its name."""
        return self.rounding or id in self.require or self.trial is not None

    def for_patch(self, id: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
        asked = {ROUNDING: True} if ROUNDING in defaults and self.may_round(id) else {}
        return {**defaults, **asked, **self.options.get(id, {})}


def _ids(what: str, given: Ids | None, known: Iterable[str]) -> frozenset[str] | None:
    if given is None:
        return None
    names = list(known)
    ids = words_of(what, given)
    for id in ids:
        if id not in names:
            raise OptionError(f"{what} names {id!r}, which is not a patch; {did_you_mean(id, names)}")
    return frozenset(ids)


def from_json(name: str, text: str) -> Any:
    """Options of patches from text. OptionError if the text is not JSON, or has a key twice."""
    try:
        return read_json(text)
    except ValueError as error:
        example = '{"paged-stash": {"moe_paged_stash": true}}'
        raise OptionError(f"{name} is not JSON of the form {example}: {error}") from None


def _patch_options(matrix: Matrix, what: str, given: Any) -> dict[str, dict[str, Any]]:
    """Options of patches, each checked against its declaration in the matrix."""
    asked = mapping_of_mappings(what, given)
    _ids(what, asked, matrix.patches)
    checked: dict[str, dict[str, Any]] = {}
    for id, values in asked.items():
        declared = matrix.patches[id].declared or {}
        checked[id] = {}
        for name, value in values.items():
            if name not in declared:
                has = f"it has {all_of(name, declared)}" if declared else "it has no options"
                raise OptionError(f"{what} of {id} name {name!r}, which is not an option of this patch; {has}")
            try:
                checked[id][name] = declared[name].checked(value)
            except ValueError as error:
                raise OptionError(f"{what} of {id}: {name} {error}") from None
    return checked


def matrix_argument(matrix: Any = None) -> str | os.PathLike[str] | None:
    """The matrix to read: the argument, else MEGATRON_SHIM_MATRIX, else None for the one that ships.

    An argument that was not given is None or Unset.
    """
    if matrix is None or isinstance(matrix, Unset):
        return os.environ.get(PREFIX + "MATRIX") or None
    return path_of("matrix", matrix)


def is_disabled() -> bool:
    """Whether MEGATRON_SHIM_DISABLE turns everything off."""
    return is_true(PREFIX + "DISABLE", os.environ.get(PREFIX + "DISABLE", ""))


def unknown_variables() -> list[str]:
    """A warning for each MEGATRON_SHIM_ variable that shim does not know."""
    known = [*VARIABLES, *OTHER_VARIABLES]
    return [
        f"the environment variable {name} means nothing to shim; {did_you_mean(name, VARIABLES)}"
        for name in sorted(os.environ)
        if name.startswith(PREFIX) and name not in known
    ]


def _from_variables(asked: Arguments) -> dict[str, tuple[str, Any]]:
    """For each argument its name for error messages and its value. Both are the variable's if it was not given."""
    found: dict[str, tuple[str, Any]] = {}
    for name, value in vars(asked).items():
        if not isinstance(value, Unset):
            found[name] = name, value
            continue
        variable, text = value.variable, os.environ.get(value.variable, "").strip()
        read: Any = value.default
        if text and name in ("only", "kinds", "require"):
            words = words_of(variable, text)
            read = () if words == (NONE,) else words or value.default
        elif text and name in FLAGS:
            read = is_true(variable, text)
        elif text:
            read = from_json(variable, text) if name == "options" else text
        found[name] = variable, read
    return found


def asked_matrix(asked: Arguments) -> Matrix:
    """The matrix that the arguments or MEGATRON_SHIM_MATRIX name, else the one that ships."""
    try:
        return load_matrix(None if asked.matrix is None else matrix_argument(asked.matrix))
    except MatrixError:
        if not is_disabled():
            raise
        return load_matrix()  # shim is disabled, so a matrix that is not valid must not stop the run


def resolve(matrix: Matrix, asked: Arguments | None = None, **given: Any) -> Options:
    """Join arguments (`asked`, or given by name) and variables. OptionError if one of them is not usable.

    MEGATRON_SHIM_DISABLE and MEGATRON_SHIM_EXCLUDE always win. The other variables yield to arguments that were given.
    Under MEGATRON_SHIM_DISABLE nothing else is read.
    """
    asked = asked or Arguments(**given)
    if is_disabled():
        return Options(disabled=True)
    known = list(matrix.patches)
    values = _from_variables(asked)
    variable = PREFIX + "EXCLUDE"
    by_operator = _ids(variable, words_of(variable, os.environ.get(variable, "")), known) or frozenset()
    what, lock = values["lock"]
    required = _ids(*values["require"], known) or frozenset()
    concerns, notes = read_concerns(*values["concerns"])
    return Options(
        only=_ids(*values["only"], known),
        exclude=(_ids("exclude", asked.exclude, known) or frozenset()) | by_operator,
        require=required - by_operator,  # an operator gets past a required patch without editing the trainer
        kinds=checked_kinds(values["kinds"][1], values["kinds"][0]),
        strict=checked_flag("strict", values["strict"][1]),
        rounding=checked_flag(ROUNDING, values[ROUNDING][1]),
        concerns=concerns,
        concerns_notes=notes,
        on_drift=checked_choice(*values["on_drift"], ON_DRIFT),
        options=_patch_options(matrix, *values["options"]),
        lock=None if lock is None else path_of(what, lock),
        packages=asked.package_names,
    )
