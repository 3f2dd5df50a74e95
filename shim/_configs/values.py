"""Settings as a tree: sections above, values below. Later settings win, and `${a.b}` refers to another one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shim._configs.settings import OPEN

__all__ = ["OPEN", "Listed", "Tree", "flattened", "key_of", "merged", "put", "resolved"]

Tree = dict[str, Any]
DEEPEST = 20  # references that lead to others


class Listed(dict[str, Any]):
    """A list of sections, by their places. Another list takes the place of the whole."""


_REFERENCE = re.compile(r"\$\{([^${}]*)\}")


def key_of(name: object) -> str:
    """The name of a setting, however it is written: --num-experts, num_experts."""
    return str(name).lstrip("-").lower().replace("-", "_")


def put(tree: Tree, path: str, value: Any) -> None:
    """Set one setting, named as Hydra does: a.b.c."""
    *above, last = [key_of(part) for part in path.split(".")]
    for part in above:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[last] = merged(tree.get(last), value)


def merged(below: Any, above: Any) -> Any:
    """The settings of `below` with those of `above`, which win."""
    if not isinstance(below, dict) or not isinstance(above, Mapping) or isinstance(above, Listed):
        return above
    found = dict(below)
    for key, value in above.items():
        found[key] = merged(found.get(key), value)
    return found


def flattened(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each setting, as the path of its keys and its value. A section that is off has `enabled` alone."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            switch = str(value.get("enabled", True)).lower()
            yield from flattened({"enabled": False} if switch == "false" else value, (*above, key))
        else:
            yield (*above, key), value


def resolved(tree: Tree) -> Tree:
    """The tree with its references replaced by what they refer to; OPEN for a reference that leads nowhere."""
    return {key: _resolved(value, tree, (key,), 0) for key, value in tree.items()}


def _resolved(value: Any, root: Tree, path: tuple[str, ...], depth: int) -> Any:
    if isinstance(value, dict):
        return {key: _resolved(item, root, (*path, key), depth) for key, item in value.items()}
    if not isinstance(value, str) or "$" not in value:
        return value
    for _ in range(DEEPEST):
        found = _REFERENCE.search(value)
        if found is None or depth > DEEPEST:
            break
        meant = _meant(found[1].strip(), root, path, depth)
        if found.span() == (0, len(value)):
            return meant
        if meant is OPEN or isinstance(meant, dict | list):
            return OPEN
        value = value[: found.start()] + str(meant) + value[found.end() :]
    return OPEN if "$" in value else value


def _meant(text: str, root: Tree, path: tuple[str, ...], depth: int) -> Any:
    """What `${text}` stands for: another setting, or what oc.select and oc.env give without one."""
    function, colon, rest = text.partition(":")
    if colon:
        name, comma, default = rest.partition(",")
        if function == "oc.select":
            meant = _at(name.strip(), root, path, depth)
            return meant if meant is not OPEN or not comma else _plain(default.strip())
        # As in a shell script, the default counts, because the variable is not at hand.
        return _plain(default.strip()) if function == "oc.env" and comma else OPEN
    return _at(text, root, path, depth)


def _at(name: str, root: Tree, path: tuple[str, ...], depth: int) -> Any:
    plain = name.lstrip(".")
    dots = len(name) - len(plain)
    place = [*path[: len(path) - dots], *plain.split(".")] if dots else plain.split(".")
    node: Any = root
    for part in place:
        if not isinstance(node, dict) or key_of(part) not in node:
            return OPEN
        node = node[key_of(part)]
    return _resolved(node, root, tuple(key_of(part) for part in place), depth + 1)


def _plain(text: str) -> Any:
    return {"null": None, "true": True, "false": False}.get(text.lower(), text.strip("\"'"))
