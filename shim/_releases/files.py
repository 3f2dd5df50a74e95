"""Reading files: sources as an import reads them, on disk or in a zip; files that decide what is applied; their JSON.

Time and memory are bounded. A file that decides what is applied is refused if others may write it.
"""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Any, NoReturn

from shim._errors import SourceError

__all__ = [
    "UnsafeFileError",
    "read_beginning",
    "read_bounded",
    "read_json",
    "source_of",
    "stamp_of",
]

SETTLED_NS = 2_000_000_000  # two seconds: the tick of the coarsest clock of a file system in use
WRITERS = ((stat.S_IWOTH, "everybody"), (stat.S_IWGRP, "its group"))


class UnsafeFileError(OSError):
    """Others than its owner may write the file. The message says who, and names the remedy."""


def read_bounded(file: Path, limit: int, *, guarded: bool = True) -> bytes:
    """The content of a regular file, of which no more than `limit` + 1 bytes. OSError says why it cannot be read.

    guarded: refuse a file that its group or everybody may write.
    """
    # Examined before it is opened, because opening a device can have an effect, and again afterwards.
    _examine(file, os.stat(file), guarded)
    # Opened without waiting, in case a pipe has taken the file's place.
    opened = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        _examine(file, os.fstat(opened), guarded)
        parts, left = [], limit + 1
        while left and (part := os.read(opened, min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    finally:
        os.close(opened)


def _examine(file: Path, found: os.stat_result, guarded: bool) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{file} is not a regular file")
    # On other systems than POSIX the mode does not say who may write.
    for bit, who in WRITERS if guarded and os.name == "posix" else ():
        if found.st_mode & bit:
            mode = stat.S_IMODE(found.st_mode)
            raise UnsafeFileError(
                f"may be written by {who} (mode {mode:04o}), who could change the applied patches. Remedy: chmod "
                f"go-w {file}, or copy it to a volume that keeps its mode"
            )


def _split(path: str) -> tuple[str, str] | None:
    """The zip that `path` leads into, and the name in it. None if no parent of `path` is a file."""
    place, inside = os.path.split(path)
    while inside and place and not os.path.isdir(place):
        if os.path.isfile(place):
            return place, inside.replace(os.sep, "/")
        above, name = os.path.split(place)
        if above == place:
            break
        place, inside = above, os.path.join(name, inside)
    return None


def source_of(path: str | None) -> str | None:
    """`path`. For byte code in a zip the source beside it, if there is one: zipimport prefers the byte code."""
    found = _split(path) if path is not None and path.endswith(".pyc") else None
    if path is None or found is None:
        return path
    from shim._releases.zips import has_member  # here, because zips are rare

    return path[:-1] if has_member(found[0], found[1][:-1]) else path


def read_beginning(path: str, size: int) -> bytes:
    """The first `size` bytes of the file at `path`, which may be in a zip. SourceError says why it cannot be read."""
    found = _split(path)
    if found is not None:
        from shim._releases.zips import beginning_in  # here, because zips are rare

        return beginning_in(*found, size)
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except (OSError, ValueError) as error:
        cause = "unreadable" if isinstance(error, OSError) else "damaged"
        raise SourceError(f"{path} cannot be read: {error}", cause) from None


def stamp_of(path: str) -> object:
    """A value that differs as soon as the file at `path`, or the zip around it, may have changed."""
    found = _split(path)
    try:
        status = os.stat(path if found is None else found[0])
    except OSError:
        return object()
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    # The clock of a file system ticks slowly: a file written just now may be written again without a new time.
    if changed > time.time_ns() - SETTLED_NS:
        return object()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


# JSON that people write or review: a duplicate key is an error, because a reader may look at the one that does not
# count.


def read_json(content: str | bytes) -> Any:
    """The value of a JSON text; bytes are UTF-8. ValueError if it is none, or an object in it has a key twice."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key {key!r}")
        found[key] = value
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
