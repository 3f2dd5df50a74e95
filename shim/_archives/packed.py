"""Sources in an archive or in a commit, read without unpacking them."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence

from shim._errors import SourceError
from shim._releases.sources import MAX_SOURCE_BYTES, Sources
from shim._releases.zips import DAMAGED, beginning_of_member

__all__ = [
    "HELD_LIMIT",
    "LARGE",
    "LINK",
    "MEMBER_LIMIT",
    "HeldSources",
    "JoinedSources",
    "PackedSources",
    "WheelSources",
    "inner_path",
]

MEMBER_LIMIT = 200_000  # the repositories of megatron-core and Transformer Engine have some thousand files
HELD_LIMIT = 60_000_000  # bytes of sources; megatron-core has 8 MB
LINK = "is a link, which is not followed"
LARGE = f"is larger than {MAX_SOURCE_BYTES} bytes"


class PackedSources(Sources):
    """Sources in an archive or a commit, read member by member. Nothing is written to disk.

    place: a description for messages.    members: the names of its files.
    root: the directory of the packages: "" or a directory with a slash at its end. Settable until the first search.
    roots: the directories that may be that root, the likeliest first. Empty if not given.
    commit: the commit that this is, or that an archive says it was made of, as 40 hexadecimal digits, or "".
    """

    def __init__(self, place: str, members: Collection[str], roots: Sequence[str] = (), commit: str = "") -> None:
        super().__init__()
        self.place = place
        self.members = members
        self.root = ""
        self.roots = roots
        self.commit = commit

    def beginning(self, name: str, size: int) -> bytes:
        """The first `size` bytes of a member; no more is unpacked. SourceError if it is missing or damaged."""
        raise NotImplementedError

    def member(self, name: str) -> bytes:
        """The content of one member. SourceError if it is too large or damaged."""
        found = self.beginning(name, MAX_SOURCE_BYTES + 1)  # the archive may state a wrong size
        if len(found) > MAX_SOURCE_BYTES:
            raise SourceError(f"{name} in {self.place} is larger than {MAX_SOURCE_BYTES} bytes", "damaged")
        return found

    def _locate(self, module: str) -> str | None:
        path = self.root + module.replace(".", "/")
        return next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in self.members), None)

    def _bytes(self, path: str) -> bytes:
        return self.member(path)


class HeldSources(PackedSources):
    """Sources whose files are held in memory, because their archive can only be read from its beginning to its end.

    odd: files that are there and were not read, with the reason: links, and files larger than any source.
    """

    def __init__(
        self,
        place: str,
        files: Mapping[str, bytes],
        odd: Mapping[str, str],
        roots: Sequence[str] = (),
        commit: str = "",
    ) -> None:
        super().__init__(place, {*files, *odd}, roots, commit)
        self._files = files
        self._odd = odd

    def beginning(self, name: str, size: int) -> bytes:
        if name in self._odd:
            raise SourceError(f"{name} in {self.place} {self._odd[name]}", "damaged")
        if name not in self._files:
            raise SourceError(f"there is no {name} in {self.place}", "missing")
        return self._files[name][:size]


class WheelSources(PackedSources):
    """Sources inside a zip, read member by member. Nothing is unpacked to disk, and no member beyond its limit."""

    def __init__(self, wheel: str | os.PathLike[str]) -> None:
        try:
            self._archive = zipfile.ZipFile(wheel)
        except DAMAGED as error:
            raise SourceError(f"{os.fspath(wheel)} is not a wheel: {error}") from None
        names = {info.filename: info for info in self._archive.infolist()}
        super().__init__(os.fspath(wheel), names)

    @property
    def comment(self) -> bytes:
        """The comment of the zip, in which GitHub names the commit."""
        return self._archive.comment

    def beginning(self, name: str, size: int) -> bytes:
        return beginning_of_member(self._archive, name, size)


class JoinedSources(Sources):
    """Packages from several places."""

    def __init__(self, places: Mapping[str, Sources]) -> None:
        super().__init__()
        self._places = dict(places)
        self._opened: dict[str, Sources] = {}  # by file

    def _locate(self, module: str) -> str | None:
        for package, sources in self._places.items():
            if f"{module}.".startswith(f"{package}."):
                path = sources.path(module)
                if path is not None:
                    self._opened[path] = sources
                return path
        return None

    def _bytes(self, path: str) -> bytes:
        return self._opened[path]._bytes(path)


def inner_path(name: str, roots: Iterable[str]) -> str | None:
    """The part of `name` below one of `roots`, if an audit reads that file: sources of the packages, and metadata."""
    for root in roots:
        path = name[len(root) :] if name.startswith(root) else ""
        if path.endswith(".py") and path.startswith(("megatron/core/", "transformer_engine/")):
            return path
        if path in ("PKG-INFO", "build_tools/VERSION.txt"):
            return path
        if path.endswith(".dist-info/METADATA") and path.count("/") == 1:
            return path
    return None
