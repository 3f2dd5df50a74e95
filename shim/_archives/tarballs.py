"""Sources inside a tar archive: an sdist, or the archive of a commit.

The module tarfile reads headers of any size into memory, and takes quadratic time for some. This reader knows regular
files and names, and nothing takes more time or memory than a limit.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Callable
from typing import BinaryIO

from shim._archives.packed import HELD_LIMIT, LARGE, LINK, MEMBER_LIMIT, HeldSources
from shim._errors import SourceError
from shim._releases.sources import MAX_SOURCE_BYTES

__all__ = ["COMMIT", "is_tarball", "open_tarball"]

BLOCK = 512
HEADER_LIMIT = 100_000  # bytes of an extended header; git and Python write a few hundred
PIECE = 1 << 20
UNPACKED_LIMIT = 500_000_000  # bytes; the repository of megatron-core has 66 MB
COMMIT = re.compile(r"[0-9a-f]{40}")
# Types of members. "x" and "g" are headers for the next member and for all, "L" and "K" are GNU tar's long names.
REGULAR, LINKS = (b"0", b"\0", b"7"), (b"1", b"2")
EXTENDED, GLOBAL, LONG_NAME, LONG_LINK = b"x", b"g", b"L", b"K"


def is_tarball(beginning: bytes) -> bool:
    """Whether a file that begins so, with a block of tar at least, is a tar archive or something that gzip packed."""
    return beginning.startswith(b"\x1f\x8b") or beginning[257:262] == b"ustar"


def open_tarball(path: str | os.PathLike[str], wanted: Callable[[str], bool]) -> HeldSources:
    """The files in the archive at `path` that are `wanted`, by name. SourceError says why it cannot be read."""
    place = os.fspath(path)
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            return _Reader(gzip.GzipFile(fileobj=file) if packed else file, place).read(wanted)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise SourceError(f"{place} is a damaged archive: {error}", "damaged") from None


class _Reader:
    """One pass through an archive. ValueError for content that no sdist has."""

    def __init__(self, file: BinaryIO | gzip.GzipFile, place: str) -> None:
        self._file = file
        self._place = place
        self._left = UNPACKED_LIMIT

    def read(self, wanted: Callable[[str], bool]) -> HeldSources:
        files: dict[str, bytes] = {}
        odd: dict[str, str] = {}
        commit, held = "", 0
        given: dict[str, str] = {}  # from extended headers, for the next member
        for _ in range(MEMBER_LIMIT):
            header = self._take(BLOCK)
            if not header.strip(b"\0"):
                return HeldSources(self._place, files, odd, commit=commit)
            kind, size, name = _checked(header)
            if kind in (EXTENDED, GLOBAL, LONG_NAME, LONG_LINK):
                content = self._content(size, HEADER_LIMIT)
                if kind == LONG_NAME:
                    given["path"] = _text(content)
                elif kind == EXTENDED:
                    given.update(_records(content))
                elif kind == GLOBAL:
                    commit = next(iter(COMMIT.findall(_records(content).get("comment", ""))), commit)
                continue
            name = os.path.normpath(given.get("path", name)).replace(os.sep, "/")
            size = _digits(given.get("size", str(size)), 10)
            given = {}
            if kind in LINKS:
                size = 0  # a hard link may state the size of its target, and has no content
            if not wanted(name) or name.startswith(("/", "../")) or kind not in (*REGULAR, *LINKS):
                self._skip(_padded(size))
                continue
            files.pop(name, None)  # of members with one name the last counts, as for tar
            odd.pop(name, None)
            if kind in LINKS or size > MAX_SOURCE_BYTES:
                odd[name] = LINK if kind in LINKS else LARGE
                self._skip(_padded(size))
                continue
            files[name] = self._content(size, MAX_SOURCE_BYTES)
            held += size
            if held > HELD_LIMIT:
                raise ValueError(f"it has more than {HELD_LIMIT} bytes of sources")
        raise ValueError(f"it has more than {MEMBER_LIMIT} members")

    def _take(self, size: int) -> bytes:
        """The next `size` bytes. At the end of the archive the rest, which is nothing in a sound one."""
        self._left -= size
        if self._left < 0:
            raise ValueError(f"it unpacks to more than {UNPACKED_LIMIT} bytes")
        found = self._file.read(size)
        if found and len(found) < size:
            raise ValueError("it ends within a member")
        return found

    def _content(self, size: int, limit: int) -> bytes:
        if size > limit:
            raise ValueError(f"it has a header of {size} bytes")
        found = self._take(size)
        if len(found) < size:
            raise ValueError("it ends within a member")
        self._skip(_padded(size) - size)
        return found

    def _skip(self, size: int) -> None:
        while size > 0:
            if not self._take(min(size, PIECE)):
                raise ValueError("it ends within a member")
            size -= PIECE


def _padded(size: int) -> int:
    return size + -size % BLOCK


def _checked(header: bytes) -> tuple[bytes, int, str]:
    """Type, size and name of the member that `header` describes."""
    summed = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    if len(header) < BLOCK or _digits(_text(header[148:156]).strip(), 8) != summed:
        raise ValueError("a header of a member does not fit its checksum")
    name = _text(header[:100])
    if header[257:263] == b"ustar\0" and header[345]:  # GNU tar keeps other things there
        name = f"{_text(header[345:500])}/{name}"
    return header[156:157], _size(header[124:136]), name


def _size(field: bytes) -> int:
    if field[0] == 0x80:  # of a member larger than eight GB
        return int.from_bytes(field[1:], "big")
    return _digits(_text(field).strip() or "0", 8)


def _digits(text: str, base: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ValueError(f"{text[:20]!r} is not a number")
    return int(text, base)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "replace")


def _records(content: bytes) -> dict[str, str]:
    """The records of an extended header, each "length key=value", a line end behind it."""
    found: dict[str, str] = {}
    at = 0
    while content[at : at + 1].isdigit():
        space = content.find(b" ", at, at + 20)
        length = _digits(_text(content[at:space]) if space > 0 else "", 10)
        if length < space - at + 2:
            raise ValueError("it has a record of no length")
        key, _, value = content[space + 1 : at + length - 1].partition(b"=")
        found[_text(key)] = _text(value)
        at += length
    return found
