"""Sources inside a wheel, read without unpacking it."""

from __future__ import annotations

import os
import zipfile

from shim._errors import SourceError
from shim._releases.archives import DAMAGED, beginning_of_member
from shim._releases.sources import MAX_SOURCE_BYTES, Sources

__all__ = ["WheelSources"]


class WheelSources(Sources):
    """Sources inside a wheel, read member by member. Nothing is unpacked to disk, and no member beyond its limit."""

    def __init__(self, wheel: str | os.PathLike[str]) -> None:
        super().__init__()
        self._wheel = os.fspath(wheel)
        try:
            self._archive = zipfile.ZipFile(wheel)
        except DAMAGED as error:
            raise SourceError(f"{self._wheel} is not a wheel: {error}") from None
        self._members = {info.filename: info for info in self._archive.infolist()}

    @property
    def members(self) -> list[str]:
        return list(self._members)

    def member(self, name: str) -> bytes:
        """The content of one member. SourceError where it is too large or damaged."""
        found = self.beginning(name, MAX_SOURCE_BYTES + 1)  # the archive may state a wrong size
        if len(found) > MAX_SOURCE_BYTES:
            raise SourceError(f"{name} in {self._wheel} is larger than {MAX_SOURCE_BYTES} bytes", "damaged")
        return found

    def beginning(self, name: str, size: int) -> bytes:
        """The first `size` bytes of a member; no more is unpacked. SourceError where it is missing or damaged."""
        return beginning_of_member(self._archive, name, size)

    def _locate(self, module: str) -> str | None:
        path = module.replace(".", "/")
        return next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in self._members), None)

    def _bytes(self, path: str) -> bytes:
        return self.member(path)
