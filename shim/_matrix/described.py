"""The description of a patch: patch.yaml in its folder. The matrix says which release gets which variant of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from shim._errors import SourceError
from shim._record import record
from shim._releases.detect import PATCHED
from shim._releases.sources import Sources

__all__ = ["PATCH_FILE", "Described", "Descriptions", "shipped_files"]

PATCH_FILE = "patch.yaml"


@record
class Described:
    """A patch with a patch.yaml. distribution: "" if the file has to say it."""

    file: Path
    content: bytes
    module: str
    distribution: str = ""


def shipped_files(patches: Path) -> list[Path]:
    """The patch.yaml of each patch that ships with shim, in the order of their paths."""
    return [Path(file) for file in sorted(map(str, patches.glob(f"*/*/{PATCH_FILE}")))]


class Descriptions:
    """Finds and reads the patch.yaml of a patch. Each file is read once.

    patches: the folder of the patches that ship with shim.
    read: reads a file; the second argument says whether others may not be able to write it.
    """

    def __init__(self, patches: Path, read: Callable[[Path, bool], bytes]) -> None:
        self.contents: dict[Path, bytes] = {}
        self._patches, self._read = patches, read

    def of(self, id: str, module: str | None = None) -> Described | None:
        """The description of a patch. None if there is none.

        module: that of a patch outside of shim. None: the patch is one of shim's.
        """
        if module is not None:
            file = _beside(module)
            return None if file is None else Described(file, self._content(file, True), module)
        for distribution in PATCHED:
            folder, name = distribution.replace("-", "_"), id.replace("-", "_")
            file = self._patches / folder / name / PATCH_FILE
            if file.is_file():
                return Described(file, self._content(file, False), f"shim.patches.{folder}.{name}", distribution)
        return None

    def _content(self, file: Path, guarded: bool) -> bytes:
        if file not in self.contents:
            self.contents[file] = self._read(file, guarded)
        return self.contents[file]


def _beside(module: str) -> Path | None:
    """The patch.yaml in the folder of a module, which is not imported."""
    try:
        found = Sources().path(module)
    except SourceError:
        return None
    file = Path(os.path.dirname(found or ""), PATCH_FILE)
    return file if found is not None and os.path.basename(found) == "__init__.py" and file.is_file() else None
