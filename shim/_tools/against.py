"""A source tree in place of what is installed, for commands that run it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from shim._errors import OptionError
from shim._releases.trees import Tree, open_tree
from shim._tools.fetching import fetched

__all__ = ["first_on_path"]


@contextlib.contextmanager
def first_on_path(target: str) -> Iterator[Tree]:
    """Put the tree that `--against` names first on sys.path. OptionError if it is no directory."""
    tree = open_tree(target, fetched)
    places = {Path(found.location) for found in tree.environment.installed.values()}
    if not all(place.is_dir() for place in places):
        raise OptionError(f"--against {target}: it is run, so it has to be a directory; unpack it")
    before = list(sys.path)
    sys.path[:0] = map(str, places)
    try:
        yield tree
    finally:
        sys.path[:] = before
