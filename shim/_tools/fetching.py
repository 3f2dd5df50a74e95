"""Releases and trees for commands that read or run others than the installed one."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shim._archives.trees import Tree, open_tree
from shim._errors import NotMetError, OptionError
from shim._tools.output import tell

__all__ = ["fetched", "first_on_path"]


def fetched(distribution: str, release: str) -> Path:
    """A release from the cache, else downloaded. A download is announced on standard error."""
    from shim.testing.releases import FetchError, fetch

    try:
        return fetch(release, distribution, tell)
    except FetchError as error:
        raise NotMetError(str(error)) from None


@contextlib.contextmanager
def first_on_path(target: str) -> Iterator[Tree]:
    """Put the tree that `--against` names first on sys.path. OptionError if it is no directory.

    Transformer Engine reads its version from the metadata of an installation, which a checkout lacks: it gets some.
    """
    tree = open_tree(target, fetched)
    places = {Path(found.location) for found in tree.environment.installed.values()}
    if not all(place.is_dir() for place in places):
        raise OptionError(f"--against {target}: it is run, so it has to be a directory; unpack it")
    before = list(sys.path)
    with tempfile.TemporaryDirectory(prefix="shim-against-") as scratch:
        engine = tree.environment.installed.get("transformer-engine")
        if engine is not None and engine.raw and not any(Path(engine.location).glob("transformer_engine*-info")):
            _write_metadata(Path(scratch), engine.raw)
            places.add(Path(scratch))
        sys.path[:0] = map(str, sorted(places))
        try:
            yield tree
        finally:
            sys.path[:] = before


def _write_metadata(directory: Path, version: str) -> None:
    place = directory / f"transformer_engine-{version}.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {version}\n", "utf-8")
