"""A second way to the import hook, for imports that do not come to it: an entry of sys.path_importer_cache.

Other code may take the hook out of sys.meta_path, as a test does that restores the list, or put a finder before it.
Python's own finder asks for each directory the finder in sys.path_importer_cache, with any sys.meta_path. So the
directories of watched modules have one that leads to the hook. It is a FileFinder that shares the state of the one that
it stands for, so that pkgutil, importlib.invalidate_caches and others find what they know. Zips have none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.machinery import FileFinder, ModuleSpec
from typing import Any

__all__ = ["PathNet"]


class PathNet:
    """The entries. `caught(name, spec)` gives the spec that an import gets."""

    def __init__(self, caught: Callable[[str, ModuleSpec], ModuleSpec]) -> None:
        class Net(FileFinder):
            def __init__(self, real: FileFinder) -> None:
                self.__dict__ = real.__dict__  # shared, so that both know what invalidate_caches() has forgotten

            def find_spec(self, fullname: str, target: Any = None) -> ModuleSpec | None:
                spec = super().find_spec(fullname, target)
                return None if spec is None else caught(fullname, spec)

        self._kind = Net
        self._nets: dict[
            str, tuple[FileFinder, FileFinder, bool]
        ] = {}  # the net, what it stands for, and if it was there

    def spread(self, directories: Iterable[str]) -> None:
        """Have entries for these directories, and no others."""
        wanted = set(directories)
        for place in [place for place in self._nets if place not in wanted]:
            net, real, was_there = self._nets.pop(place)
            if sys.path_importer_cache.get(place) is not net:
                continue
            if was_there:
                sys.path_importer_cache[place] = real
            else:
                sys.path_importer_cache.pop(place, None)
        for place in wanted:
            held = self._nets.get(place)
            known: Any = sys.path_importer_cache.get(place)
            if held is not None and known is held[0]:
                continue
            found = known if known is not None else _finder_of(place)
            if type(found) is FileFinder:
                net = self._kind(found)
                self._nets[place] = net, found, known is not None
                sys.path_importer_cache[place] = net


def _finder_of(place: str) -> Any:
    for hook in sys.path_hooks:
        try:
            return hook(place)
        except ImportError:
            continue
    return None
