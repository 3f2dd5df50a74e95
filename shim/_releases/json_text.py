"""JSON that people write or review: a duplicate key is an error, because a reader may look at the one that does not
count. Errors say the line and the key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

__all__ = ["JsonTextError", "line_of", "read_json", "unknown_key"]

TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}:,]|[^\s"\[\]{}:,]+', re.S)
Path = tuple["str | int", ...]


class JsonTextError(ValueError):
    """The text is not JSON, or means two things. `line` counts from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


class _DuplicateKeyError(ValueError):
    pass


def read_json(content: str | bytes) -> Any:
    """The value of a JSON text; bytes are UTF-8. JsonTextError if it is none, or an object in it has a key twice."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except _DuplicateKeyError:
        raise _duplicate_in(text) from None
    except json.JSONDecodeError as error:
        raise JsonTextError(f"{error.msg} (column {error.colno})", error.lineno) from None
    except RecursionError:
        raise JsonTextError("nested too deeply", 1) from None
    except ValueError as error:  # not UTF-8, a number of too many digits, or NaN
        raise JsonTextError(str(error), 1) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _DuplicateKeyError
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _duplicate_in(text: str) -> JsonTextError:
    seen: set[Path] = set()
    for path, line in _keys(text):
        if path in seen:
            return JsonTextError(f"duplicate key {path[-1]!r} {_place(path[:-1])}", line)
        seen.add(path)
    return JsonTextError("duplicate key", 1)  # not reached: a parsed text also has its keys here


def line_of(text: str, path: Path) -> int:
    """The line of the key that `path` leads to in a JSON text that was read, from 1; 1 if there is none."""
    return next((line for found, line in _keys(text) if found == path), 1)


def unknown_key(text: str, value: Any, path: Path, known: Mapping[str, object] | tuple[str, ...]) -> None:
    """JsonTextError for the first key of the object `value` that is not one of `known`. `path` leads to the object."""
    for key in value:
        if key not in known:
            message = f"unknown key {key!r} {_place(path)}; known are {', '.join(known)}"
            raise JsonTextError(message, line_of(text, (*path, key)))


def _place(path: Path) -> str:
    return f"in {'.'.join(map(str, path))}" if path else "at the top"


def _keys(text: str) -> Iterator[tuple[Path, int]]:
    """Each key of the objects in a JSON text, by the way to it (names, and places in lists), with its line."""
    path: list[str | int] = []  # the way to the value that comes next
    is_object: list[bool] = []
    at_key, line, last = False, 1, 0
    for token in TOKEN.finditer(text):
        line, last = line + text.count("\n", last, token.start()), token.start()
        mark = token.group()
        if mark in "{[":
            is_object.append(mark == "{")
            path.append("" if mark == "{" else 0)
            at_key = mark == "{"
        elif mark in "}]":
            is_object.pop()
            path.pop()
            at_key = False
        elif mark == ",":
            at_key = is_object[-1]
            if not at_key:
                path[-1] = int(path[-1]) + 1
        elif at_key:
            path[-1] = json.loads(mark, strict=False)
            yield tuple(path), line
            at_key = False
