"""Where the processes of proofs look for aliases: only in modules that hold something of megatron-core's.

A search for aliases looks at each value of each module, and of each class in them. That is most of what it takes to
apply one patch, and in a forked process a look at a value copies the memory page that it is on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shim._engine import transactions
from shim._engine.names import Location, is_kind, namespace_of, unwrap

__all__ = ["narrow"]

_caller: Any = transactions  # the module that searches, by its own name of find_aliases
_PATCHED = ("megatron", "transformer_engine")
_Search = Callable[..., list[Location]]


def narrow() -> None:
    """Let this process, and those that it forks, leave out the modules that hold nothing of the packages to patch.

    To be called when they are imported and nothing is applied. Modules that come later are searched. If the shorter
    search does not find all that the long one does, nothing changes.
    """
    search: _Search = _caller.find_aliases
    objects = list(_own_objects())
    places = search(objects)
    holders = {_module_of(owner) for owner, _, _ in places}
    clean = frozenset(name for name in sys.modules if name not in holders and not _is_patched(name))
    shorter = functools.partial(_search, search, clean)
    if _names(shorter(objects)) == _names(places):
        _caller.find_aliases = shorter


def _search(
    search: _Search, clean: frozenset[str], objects: Iterable[Any], modules: Iterable[str] | None = None
) -> list[Location]:
    objects = list(objects)
    if modules is None and all(_is_patched(getattr(item, "__module__", None)) for item in objects):
        modules = [name for name in list(sys.modules) if name not in clean]
    return search(objects, modules)


def _own_objects() -> Iterator[Any]:
    """The functions and classes of the packages to patch, in their modules and classes."""
    left = [module for name, module in list(sys.modules.items()) if _is_patched(name)]
    seen: set[int] = set()
    while left:
        for value in map(unwrap, list(namespace_of(left.pop()).values())):
            if id(value) in seen or not callable(value) or not _is_patched(getattr(value, "__module__", None)):
                continue
            seen.add(id(value))
            yield value
            if is_kind(value, type):
                left.append(value)


def _is_patched(module: object) -> bool:
    return is_kind(module, str) and str(module).partition(".")[0] in _PATCHED


def _module_of(owner: Any) -> str:
    return str(namespace_of(owner).get("__module__" if is_kind(owner, type) else "__name__"))


def _names(places: list[Location]) -> set[tuple[int, str]]:
    return {(id(owner), name) for owner, name, _ in places}
