"""Options of patches, read from a matrix."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import yaml

from shim._matrix.declared import BOUNDS, TYPES, Declared
from shim._matrix.reader import Reader

__all__ = ["read_declared"]

KEYS = {"default": True, **dict.fromkeys(("type", "choices", "minimum", "maximum", "above", "switch"), False)}


def read_declared(read: Reader, name: str, node: yaml.Node) -> Declared:
    """An option: a mapping of KEYS, or just the default. Then shim checks nothing but the type."""
    if not isinstance(node, yaml.MappingNode):
        return Declared(name, default := read.scalar(node, name), _type(read, name, node, default, None))
    given = read.mapping(node, f"option {name}", KEYS)
    default = read.scalar(given["default"], f"default of {name}")
    kind = read.text(given["type"], f"type of {name}", tuple(TYPES)) if "type" in given else None
    kind = _type(read, name, node, default, kind)
    choices = read.texts(given["choices"], f"choices of {name}") if "choices" in given else ()
    bounds = {key: _number(read, given[key], f"{key} of {name}") for key in BOUNDS if key in given}
    switch = "switch" in given and read.flag(given["switch"], f"switch of {name}")
    if switch and default is not False:
        raise read.fail(node, f"option {name}: a switch is false by default")
    if (choices and kind != "str") or (bounds and kind not in ("int", "float")):
        raise read.fail(node, f"option {name}: choices belong to text, and {', '.join(BOUNDS)} to numbers")
    found = Declared(name, default, kind, choices, **bounds, switch=switch)
    try:
        return replace(found, default=found.checked(default))
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
