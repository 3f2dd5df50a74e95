"""Sources in an archive or in a commit, held in memory: nothing is unpacked to disk."""

from __future__ import annotations

import lzma
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import IO

from shim._errors import SourceError
from shim._releases.sources import MAX_SOURCE_BYTES, Sources

__all__ = ["HELD_LIMIT", "LARGE", "LINK", "JoinedSources", "PackedSources", "inner_path", "open_archive", "roots_of"]

HELD_LIMIT = 60_000_000  # bytes of sources; megatron-core has 8 MB
LINK = "is a link, which is not followed"
LARGE = f"is larger than {MAX_SOURCE_BYTES} bytes"
COMMIT = re.compile(r"[0-9a-f]{40}")
DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
)


class PackedSources(Sources):
    """Sources in an archive or a commit.

    place: a description for messages.    files: the contents by name.
    odd: files that are there and were not read, with the reason: links, and files larger than any source.
    root: the directory of the packages: "" or a directory with a slash at its end. Settable until the first search.
    roots: the directories that may be that root, the likeliest first. Empty if not given.
    commit: the commit that this is, or that an archive says it was made of, as 40 hexadecimal digits, or "".
    """

    def __init__(
        self,
        place: str,
        files: Mapping[str, bytes],
        odd: Mapping[str, str] = MappingProxyType({}),
        roots: Sequence[str] = (),
        commit: str = "",
    ) -> None:
        super().__init__()
        self.place = place
        self.members = {*files, *odd}
        self.root = ""
        self.roots = roots
        self.commit = commit
        self._files = files
        self._odd = odd

    def member(self, name: str) -> bytes:
        """The content of one member. SourceError if it is missing, or was not read."""
        if name in self._odd:
            raise SourceError(f"{name} in {self.place} {self._odd[name]}", "damaged")
        if name not in self._files:
            raise SourceError(f"there is no {name} in {self.place}", "missing")
        return self._files[name]

    def _locate(self, module: str) -> str | None:
        path = self.root + module.replace(".", "/")
        return next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in self.members), None)

    def _bytes(self, path: str) -> bytes:
        return self.member(path)


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


def roots_of(members: Iterable[str]) -> list[str]:
    """Where packages may begin in an archive: at its top, or one directory down, as in an sdist."""
    return ["", *dict.fromkeys(f"{member.partition('/')[0]}/" for member in members if "/" in member)]


def open_archive(path: str) -> PackedSources:
    """What an audit reads of a wheel, an sdist, or the archive of a commit. SourceError says why it cannot be read."""
    files: dict[str, bytes] = {}
    odd: dict[str, str] = {}
    held = 0  # bytes
    try:
        with zipfile.ZipFile(path) if zipfile.is_zipfile(path) else tarfile.open(path) as archive:
            for name, size, file in _in_zip(archive) if isinstance(archive, zipfile.ZipFile) else _in_tar(archive):
                held -= len(files.pop(name, b""))  # of members with one name the last counts
                odd.pop(name, None)
                if file is None or size > MAX_SOURCE_BYTES:
                    odd[name] = LINK if file is None else LARGE
                    continue
                with file:
                    files[name] = file.read()
                held += len(files[name])
                if held > HELD_LIMIT:
                    raise ValueError(f"it has more than {HELD_LIMIT} bytes of sources")
            return PackedSources(path, files, odd, commit=_commit_of(archive))
    except DAMAGED as error:
        raise SourceError(f"{path} is no archive that can be read: {error}", "damaged") from None


_Members = Iterator[tuple[str, int, "IO[bytes] | None"]]  # name, size, and the content; None for a link


def _in_zip(archive: zipfile.ZipFile) -> _Members:
    for member in archive.infolist():
        if inner_path(member.filename, roots_of([member.filename])) is not None:
            yield member.filename, member.file_size, archive.open(member)


def _in_tar(archive: tarfile.TarFile) -> _Members:
    for member in archive:
        name = os.path.normpath(member.name).replace(os.sep, "/")
        if inner_path(name, roots_of([name])) is not None and (member.isfile() or member.issym() or member.islnk()):
            yield name, member.size, archive.extractfile(member) if member.isfile() else None
    while archive.fileobj is not None and archive.fileobj.read(1 << 20):
        continue  # to the end, where gzip has its checksum


def _commit_of(archive: zipfile.ZipFile | tarfile.TarFile) -> str:
    """The commit that git and GitHub name in an archive."""
    if isinstance(archive, zipfile.ZipFile):
        comment = archive.comment.decode("ascii", "replace")
    else:
        comment = archive.pax_headers.get("comment", "")
    return next(iter(COMMIT.findall(comment)), "")
