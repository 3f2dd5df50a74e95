"""Members of a zip on sys.path, or of a wheel. Nothing unpacks more than a limit."""

from __future__ import annotations

import struct
import zipfile
import zlib

from shim._errors import SourceError

__all__ = ["DAMAGED", "beginning_in", "beginning_of_member", "has_member"]

# zipimport knows no other methods. For others, zipfile unpacks whole blocks, and a few kB may unpack to gigabytes.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error, OSError, RuntimeError, ValueError, EOFError, OverflowError)


def has_member(archive: str, name: str) -> bool:
    """Whether the zip at `archive` can be read and has the member `name`."""
    try:
        with zipfile.ZipFile(archive) as opened:
            return name in opened.NameToInfo
    except DAMAGED:
        return False


def beginning_in(archive: str, name: str, size: int) -> bytes:
    """The first `size` bytes of a member of the zip at `archive`. SourceError says why it cannot be read."""
    try:
        with zipfile.ZipFile(archive) as opened:
            return beginning_of_member(opened, name, size)
    except OSError as error:
        raise SourceError(f"{archive}: {name} cannot be read: {error}", "unreadable") from None
    except DAMAGED as error:
        raise SourceError(f"{archive}: {name} cannot be read: {error}", "damaged") from None


def beginning_of_member(archive: zipfile.ZipFile, name: str, size: int) -> bytes:
    """The first `size` bytes of a member; no more is unpacked. SourceError if it is missing or damaged."""
    where = f"{name} in {archive.filename}"
    if name not in archive.NameToInfo:
        raise SourceError(f"there is no {where}", "missing")
    if archive.NameToInfo[name].compress_type not in METHODS:
        raise SourceError(f"{where} has a compression that wheels do not use", "damaged")
    try:
        with archive.open(name) as file:
            return file.read(size)
    except DAMAGED as error:
        raise SourceError(f"{where} cannot be read: {error}", "damaged") from None
