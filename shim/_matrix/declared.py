"""Options of patches as the matrix declares them: a default, a type, and a range or choices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import yaml

from shim._matrix.reader import Reader
from shim._matrix.spelling import one_of

__all__ = ["Declared", "read_declared"]

TYPES = {"bool": bool, "int": int, "float": float, "str": str}
NAMES = {"bool": "True or False", "int": "an integer", "float": "a finite number", "str": "text"}
KEYS = {"default": True, "type": False, "choices": False, "minimum": False, "maximum": False, "above": False}
BOUNDS = {"minimum": "at least", "above": "above", "maximum": "at most"}


@dataclass(frozen=True)
class Declared:
    """One option. Where the default is None, None can be given, too.

    `minimum` and `maximum` are allowed themselves, `above` is not.
    """

    name: str
    default: Any
    type: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None

    @property
    def takes(self) -> str:
        """In words, the values that the option takes."""
        if self.choices:
            what = "one of " + ", ".join(self.choices)
        else:
            limits = [
                f"{words} {bound}" for name, words in BOUNDS.items() if (bound := getattr(self, name)) is not None
            ]
            what = ", ".join([NAMES[self.type], *limits])
        return what if self.default is not None else f"{what}, or None"

    def checked(self, value: Any) -> Any:
        """`value` as the patch gets it; ValueError says what it must be."""
        if value is None and self.default is None:
            return None
        if self.type == "float" and isinstance(value, int) and not isinstance(value, bool):
            try:
                value = float(value)
            except OverflowError:
                value = math.inf
        if not self._allows(value):
            takes = one_of(value, self.choices) if self.choices else self.takes
            raise ValueError(f"is {value!r}; it must be {takes}")
        return value

    def _allows(self, value: Any) -> bool:
        # A bool is an int to Python, and hardly ever meant as one.
        if not isinstance(value, TYPES[self.type]) or (isinstance(value, bool) and self.type != "bool"):
            return False
        if self.choices and value not in self.choices:
            return False
        if not isinstance(value, (int, float)):
            return True
        return math.isfinite(value) and (
            (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
        )


def read_declared(read: Reader, name: str, node: yaml.Node) -> Declared:
    """An option of the matrix: a mapping of KEYS, or just the default, whose type is then all that is checked."""
    if not isinstance(node, yaml.MappingNode):
        return Declared(name, default := read.scalar(node, name), _type(read, name, node, default, None))
    given = read.mapping(node, f"option {name}", KEYS)
    default = read.scalar(given["default"], f"default of {name}")
    kind = read.text(given["type"], f"type of {name}", tuple(TYPES)) if "type" in given else None
    kind = _type(read, name, node, default, kind)
    choices = read.texts(given["choices"], f"choices of {name}") if "choices" in given else ()
    bounds = {key: _number(read, given[key], f"{key} of {name}") for key in BOUNDS if key in given}
    if (choices and kind != "str") or (bounds and kind not in ("int", "float")):
        raise read.fail(node, f"option {name}: choices belong to text, and {', '.join(BOUNDS)} to numbers")
    found = Declared(name, default, kind, choices, **bounds)
    try:
        return Declared(name, found.checked(default), kind, choices, **bounds)
    except ValueError as error:
        raise read.fail(given["default"], f"the default of {name} {error}") from None


def _type(read: Reader, name: str, node: yaml.Node, default: Any, kind: str | None) -> str:
    if kind is not None:
        return kind
    if default is None:
        raise read.fail(node, f"option {name} has no default to tell its type; say {{default: null, type: ...}}")
    return type(default).__name__


def _number(read: Reader, node: yaml.Node, what: str) -> float:
    value = read.scalar(node, what)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise read.fail(node, f"{what} must be a finite number")
    return value
