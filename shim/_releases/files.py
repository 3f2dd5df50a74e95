"""Files that decide what is applied: read in bounded time and memory, and refused where others may write them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["UnsafeFileError", "read_bounded"]

WRITERS = ((stat.S_IWOTH, "everybody"), (stat.S_IWGRP, "its group"))


class UnsafeFileError(OSError):
    """Others than its owner may write the file; the message says who, and the remedy."""


def read_bounded(file: Path, limit: int, *, guarded: bool = True) -> bytes:
    """The content of a regular file of at most `limit` bytes, or its first `limit` + 1; OSError says why there is none.

    guarded: refuse what its group or everybody may write.
    """
    # Looked at before it is opened, because opening a device can have an effect, and again afterwards.
    _examine(file, os.stat(file), guarded)
    # Without waiting, in case a pipe has taken the file's place.
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
    # Elsewhere than on POSIX the mode says nothing about who may write.
    for bit, who in WRITERS if guarded and os.name == "posix" else ():
        if found.st_mode & bit:
            mode = stat.S_IMODE(found.st_mode)
            raise UnsafeFileError(
                f"may be written by {who} (mode {mode:04o}), who could so decide what is applied here. Remedy: chmod "
                f"go-w {file}, or copy it to where its mode can be kept"
            )
