"""Sources inside a wheel, or another zip, read without unpacking it."""

from __future__ import annotations

import os
import zipfile

from shim._errors import SourceError
from shim._releases.archives import DAMAGED, beginning_of_member
from shim._releases.packed import PackedSources

__all__ = ["WheelSources"]


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
