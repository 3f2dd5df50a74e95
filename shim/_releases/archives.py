"""Files as an import reads them: on disk, or inside a zip that stands on sys.path. No more than a limit is read."""

from __future__ import annotations

import os
import struct
import time
import zipfile
import zlib

from shim._errors import SourceError

__all__ = ["DAMAGED", "beginning_of_member", "read_beginning", "source_of", "stamp_of"]

SETTLED_NS = 2_000_000_000  # the coarsest clock of a file system in use ticks every two seconds
# zipimport knows no other, and of others zipfile unpacks whole blocks, of which a few kB may stand for gigabytes.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error, OSError, RuntimeError, ValueError, EOFError, OverflowError)


def _split(path: str) -> tuple[str, str] | None:
    """The zip that `path` leads into, and the name in it; None where no parent of `path` is a file."""
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
    """The source beside byte code in a zip, of which zipimport takes the byte code; any other path as it is."""
    found = _split(path) if path is not None and path.endswith(".pyc") else None
    if path is None or found is None:
        return path
    try:
        with zipfile.ZipFile(found[0]) as archive:
            return path[:-1] if found[1][:-1] in archive.NameToInfo else path
    except DAMAGED:
        return path


def read_beginning(path: str, size: int) -> bytes:
    """The first `size` bytes of the file at `path`, which may lie in a zip; SourceError says why there are none."""
    found = _split(path)
    try:
        if found is None:
            with open(path, "rb") as file:
                return file.read(size)
        with zipfile.ZipFile(found[0]) as archive:
            return beginning_of_member(archive, found[1], size)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error}", "unreadable") from None
    except DAMAGED as error:
        raise SourceError(f"{path} cannot be read: {error}", "damaged") from None


def stamp_of(path: str) -> object:
    """What is another as soon as the file at `path`, or the zip it lies in, may be another."""
    found = _split(path)
    try:
        status = os.stat(path if found is None else found[0])
    except OSError:
        return object()
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    # The clock of a file system ticks slowly: what was written just now may be written again without a trace.
    if changed > time.time_ns() - SETTLED_NS:
        return object()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def beginning_of_member(archive: zipfile.ZipFile, name: str, size: int) -> bytes:
    """The first `size` bytes of a member, for which no more than that is unpacked; SourceError where damaged."""
    where = f"{name} in {archive.filename}"
    if name not in archive.NameToInfo:
        raise SourceError(f"there is no {where}", "missing")
    if archive.NameToInfo[name].compress_type not in METHODS:
        raise SourceError(f"{where} is compressed as no wheel is", "damaged")
    try:
        with archive.open(name) as file:
            return file.read(size)
    except DAMAGED as error:
        raise SourceError(f"{where} cannot be read: {error}", "damaged") from None
