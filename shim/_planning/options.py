"""The arguments of the caller and the variables of the environment, joined, and checked against the matrix."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

from shim._errors import OptionError
from shim._matrix.model import Matrix
from shim._matrix.spelling import all_of, did_you_mean
from shim._planning.arguments import (
    NONE,
    ON_DRIFT,
    PREFIX,
    Arguments,
    Ids,
    Unset,
    checked_choice,
    checked_flag,
    checked_kinds,
    is_true,
    mapping_of_mappings,
    path_of,
    words_of,
)
from shim._planning.evidence import Proved
from shim._record import record
from shim._releases.json_text import JsonTextError, read_json

__all__ = [
    "VARIABLES",
    "Options",
    "from_json",
    "is_disabled",
    "matrix_argument",
    "resolve",
    "unknown_variables",
]

VARIABLES = tuple(
    PREFIX + name
    for name in (
        "DISABLE",
        "EXCLUDE",
        "ONLY",
        "KINDS",
        "REQUIRE",
        "STRICT",
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
    """Resolved options. None for `only` and `kinds` means all. `disabled` turns everything off.

    lock_content: what the file `lock` holds, if it was read for a plan.
    trial: patches to apply whatever their bodies are, in a process that runs proofs (evidence.trial_of).
    """

    only: frozenset[str] | None = None
    exclude: frozenset[str] = frozenset()
    require: frozenset[str] = frozenset()
    kinds: frozenset[str] | None = None
    strict: bool = False
    on_drift: str = "skip"
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    disabled: bool = False
    lock: str | None = None
    packages: tuple[str, ...] = ()
    lock_content: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    trial: Mapping[str, Proved] | None = field(default=None, compare=False, repr=False)

    def for_patch(self, id: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
        return {**defaults, **self.options.get(id, {})}


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
    except JsonTextError as error:
        example = '{"paged-stash": {"moe_paged_stash": true}}'
        raise OptionError(f"{name} is not JSON of the form {example}: line {error.line}: {error}") from None


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
        elif text and name == "strict":
            read = is_true(variable, text)
        elif text:
            read = from_json(variable, text) if name == "options" else text
        found[name] = variable, read
    return found


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
    return Options(
        only=_ids(*values["only"], known),
        exclude=(_ids("exclude", asked.exclude, known) or frozenset()) | by_operator,
        require=required - by_operator,  # an operator gets past a required patch without editing the trainer
        kinds=checked_kinds(values["kinds"][1], values["kinds"][0]),
        strict=checked_flag(values["strict"][1]),
        on_drift=checked_choice(*values["on_drift"], ON_DRIFT),
        options=_patch_options(matrix, *values["options"]),
        lock=None if lock is None else path_of(what, lock),
        packages=asked.package_names,
    )
