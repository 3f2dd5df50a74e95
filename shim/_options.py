"""What the caller and the environment ask for, as one checked value."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shim._errors import OptionError
from shim._matrix import KINDS, Matrix

__all__ = ["ON_DRIFT", "VARIABLES", "Options", "resolve"]

ON_DRIFT = ("skip", "error", "apply")
PREFIX = "MEGATRON_SHIM_"
VARIABLES = tuple(
    PREFIX + name for name in ("DISABLE", "EXCLUDE", "ONLY", "REQUIRE", "STRICT", "ON_DRIFT", "MATRIX", "LOCK")
)
TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Options:
    """Resolved options: None for `only` and `kinds` means all; `disabled` turns everything off."""

    only: frozenset[str] | None = None
    exclude: frozenset[str] = frozenset()
    require: frozenset[str] = frozenset()
    kinds: frozenset[str] | None = None
    strict: bool = False
    on_drift: str = "skip"
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    disabled: bool = False
    lock: str | None = None

    def for_patch(self, id: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
        return {**defaults, **self.options.get(id, {})}


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.replace(",", " ").split() if word)


def _flag(name: str, text: str) -> bool:
    word = text.strip().lower()
    if word in TRUE or word in FALSE:
        return word in TRUE
    raise OptionError(f"{name}={text!r} is neither true nor false; use 1 or 0")


def _ids(what: str, given: Iterable[str] | str | None, known: Iterable[str]) -> frozenset[str] | None:
    if given is None:
        return None
    ids = [given] if isinstance(given, str) else list(given)
    for id in ids:
        if id not in known:
            near = difflib.get_close_matches(str(id), list(known), 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise OptionError(f"{what} names {id!r}, which is not a patch; {hint}")
    return frozenset(ids)


def matrix_argument(matrix: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    """The matrix to read: the argument, else MEGATRON_SHIM_MATRIX, else None for the one that ships."""
    return matrix if matrix is not None else os.environ.get(PREFIX + "MATRIX") or None


def resolve(
    matrix: Matrix,
    *,
    only: Iterable[str] | str | None = None,
    exclude: Iterable[str] | str = (),
    require: Iterable[str] | str = (),
    kinds: Iterable[str] | str | None = None,
    strict: bool | None = False,
    on_drift: str | None = "skip",
    options: Mapping[str, Mapping[str, Any]] | None = None,
    lock: str | os.PathLike[str] | None = None,
) -> Options:
    """Join arguments and environment variables; OptionError where one of them is not usable.

    MEGATRON_SHIM_DISABLE and MEGATRON_SHIM_EXCLUDE always win; the other variables yield to arguments.
    """
    known = list(matrix.patches)
    environ = os.environ
    if lock is None:
        lock = environ.get(PREFIX + "LOCK") or None
    if only is None and environ.get(PREFIX + "ONLY"):
        only = _words(environ[PREFIX + "ONLY"]) or None
    if not require and environ.get(PREFIX + "REQUIRE"):
        require = _words(environ[PREFIX + "REQUIRE"])
    if not strict and environ.get(PREFIX + "STRICT"):
        strict = _flag(PREFIX + "STRICT", environ[PREFIX + "STRICT"])
    if on_drift in (None, "skip") and environ.get(PREFIX + "ON_DRIFT"):
        on_drift = environ[PREFIX + "ON_DRIFT"].strip()
    if on_drift is None:
        on_drift = "skip"
    if on_drift not in ON_DRIFT:
        raise OptionError(f"on_drift is {on_drift!r}; it must be one of {', '.join(ON_DRIFT)}")
    asked_kinds = None if kinds is None else frozenset([kinds] if isinstance(kinds, str) else kinds)
    for kind in asked_kinds or ():
        if kind not in KINDS:
            raise OptionError(f"kinds names {kind!r}; it must be one of {', '.join(KINDS)}")
    given = {id: dict(values) for id, values in (options or {}).items()}
    _ids("options", given, known)
    for id, values in given.items():
        allowed = matrix.patches[id].options or {}
        for name in values:
            if name not in allowed:
                has = f"it has {', '.join(allowed)}" if allowed else "it has none"
                raise OptionError(f"options of {id} name {name!r}, which is not an option of it; {has}")
    by_operator = _ids(PREFIX + "EXCLUDE", _words(environ.get(PREFIX + "EXCLUDE", "")), known) or frozenset()
    required = _ids("require", require, known) or frozenset()
    return Options(
        only=_ids("only", only, known),
        exclude=(_ids("exclude", exclude, known) or frozenset()) | by_operator,
        require=required - by_operator,  # who runs the job gets past a patch without editing the trainer
        kinds=asked_kinds,
        strict=bool(strict),
        on_drift=on_drift,
        options=given,
        disabled=_flag(PREFIX + "DISABLE", environ.get(PREFIX + "DISABLE", "")),
        lock=None if lock is None else os.fspath(lock),
    )
