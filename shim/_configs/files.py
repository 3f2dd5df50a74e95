"""Where the files lie that a configuration names, and what was found of them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shim._errors import OptionError

__all__ = ["Search"]


# Scripts that set up a machine, not a training.
_OF_ENVIRONMENT = re.compile(r"activate|bashrc|profile|conda|[/_]?set_?env|setvars|^/(?:etc|usr|opt)/|env\.sh|\.env$")


@dataclass
class Search:
    """The folders of --config-path, and what became of each file that was looked for.

    asked: the option that names one.
    """

    folders: tuple[Path, ...] = ()
    asked: str = "--config"
    followed: list[str] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)  # who names it, and what
    passed: list[tuple[str, str]] = field(default_factory=list)  # the same of files that set up an environment
    others: list[str] = field(default_factory=list)  # scripts that scripts run, and that were not found
    open_files: list[Path] = field(default_factory=list)  # those that are being read, outermost first

    def find(self, name: str, beside: Path) -> Path | None:
        """The file or folder of this name: beside the file that names it, below where one works, or further up.

        A project is often started from its root, so names are also tried from each folder above `beside`. So is the
        end of a path that is not here.
        """
        tried = [beside, Path.cwd(), *self.folders, *beside.resolve().parents]
        wanted = Path(name).expanduser()
        names = [wanted]
        if wanted.is_absolute():  # where the project lies on another machine: /root/slime/scripts/models/x.sh
            names += [Path(*wanted.parts[start:]) for start in range(2, len(wanted.parts) - 1)]
        return next((found for one in names for folder in tried if (found := folder / one).exists()), None)

    def find_in_package(self, name: str, beside: Path) -> Path | None:
        """The folder of a package, a.b.c: in a checkout near by, or as it is installed. Nothing is imported."""
        top, *parts = name.split(".")
        near = self.find(name.replace(".", "/"), beside)
        if near is not None:
            return near
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            return None
        places: Iterable[str] = (spec and spec.submodule_search_locations) or ()
        return next((found for place in places if (found := Path(place, *parts)).exists()), None)

    def text_of(self, file: Path) -> str:
        """OptionError if the file cannot be read."""
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"{self.asked} {file} cannot be read: {error}") from None

    def enter(self, file: Path, by: str) -> None:
        """Begin to read a file. OptionError if it is being read already: `by` says which line names it."""
        place = file.resolve()
        if place in self.open_files:
            chain = " -> ".join(path.name for path in [*self.open_files[self.open_files.index(place) :], place])
            raise OptionError(f"{by} closes a cycle: {chain}. Take one of these references out.")
        if self.open_files:
            self.followed.append(str(file))
        self.open_files.append(place)

    def leave(self) -> None:
        self.open_files.pop()

    def miss(self, by: str, what: str) -> None:
        found = self.passed if _OF_ENVIRONMENT.search(what) else self.missing
        if (by, what) not in found:
            found.append((by, what))
