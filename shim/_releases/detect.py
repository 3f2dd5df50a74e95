"""Step 1, detect: which releases are installed, without importing or running any of them."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlparse

from packaging.version import Version

from shim._errors import SourceError
from shim._printing.printable import one_line
from shim._record import record
from shim._releases.files import read_beginning
from shim._releases.sources import Sources, parse
from shim._releases.versions import parse_version

__all__ = [
    "DISTRIBUTIONS",
    "PATCHED",
    "VERSION_FILE_LIMIT",
    "VERSION_LIMIT",
    "Environment",
    "Installed",
    "Recorded",
    "detect",
    "place_of",
    "recorded",
    "same_place",
    "version_in_package_info",
]

PATCHED = ("megatron-core", "transformer-engine")  # the distributions that patches are of; torch is only reported
VERSION_LIMIT = 100  # characters of a version
METADATA_LIMIT = 1_000_000  # bytes; the largest real METADATA has 100 kB
VERSION_FILE_LIMIT = 100_000  # bytes; the largest real one has 3 kB


@record
class Installed:
    """One distribution as found on this machine.

    raw: the version as it is written, as one printable line.    origin: the source that gave it.
    version: `raw` as a PEP 440 version. None if it is not one: then bodies alone decide.
    location: the package directory that an import would use.
    problems: disagreements between the sources.
    """

    distribution: str
    package: str
    location: str
    raw: str | None = None
    origin: str = "unknown"
    problems: tuple[str, ...] = ()

    @property
    def version(self) -> Version | None:
        return parse_version(self.raw)

    @property
    def release(self) -> str:
        """The name and the version, in words."""
        return f"{self.distribution} {self.raw or 'of unknown version'}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": self.raw,
            "public": None if self.version is None else self.version.public,
            "origin": self.origin,
            "location": self.location,
            "problems": list(self.problems),
        }

    def __str__(self) -> str:
        return f"{self.release} ({self.origin}, {one_line(self.location)})"


@record
class Environment:
    """The installed releases, and the sources to read."""

    installed: Mapping[str, Installed]
    sources: Sources = field(compare=False, repr=False)
    python: str = ".".join(map(str, sys.version_info[:3]))

    @property
    def versions(self) -> dict[str, Version]:
        """The known versions of the installed releases."""
        return {name: i.version for name, i in self.installed.items() if i.version is not None}

    def to_dict(self) -> dict[str, Any]:
        return {"python": self.python, "installed": {name: i.to_dict() for name, i in self.installed.items()}}


def _read(path: Path) -> str | None:
    try:
        found = read_beginning(str(path), VERSION_FILE_LIMIT + 1)
    except SourceError:
        return None
    return found.decode("utf-8", "replace") if len(found) <= VERSION_FILE_LIMIT else None


def _constants(text: str) -> dict[str, object]:
    """Literal assignments at the top level of a version file. Nothing is run."""
    found: dict[str, object] = {}
    try:
        tree = parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return found
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets: list[ast.expr] = [node.target]
        elif isinstance(node, ast.Assign):
            targets = node.targets
        else:
            continue
        value = node.value
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                found[target.id] = value.value
    return found


def _megatron_core_version(package: Path) -> str | None:
    return version_in_package_info(_read(package / "package_info.py") or "")


def version_in_package_info(text: str) -> str | None:
    """The version that megatron-core's package_info.py gives in parts. None if it does not."""
    found = _constants(text)
    numbers = [found.get(name) for name in ("MAJOR", "MINOR", "PATCH")]
    if not all(type(number) is int and number < 10**6 for number in numbers):
        return None
    return ".".join(map(str, numbers)) + str(found.get("PRE_RELEASE") or "")


def _transformer_engine_version(package: Path) -> str | None:
    text = _read(package.parent / "build_tools" / "VERSION.txt")
    return text.strip() or None if text else None


def _torch_version(package: Path) -> str | None:
    value = _constants(_read(package / "version.py") or "").get("__version__")
    return value if isinstance(value, str) else None


@record
class _Known:
    """A distribution that a plan asks about. version_file: reads the version from a copy of the package."""

    package: str
    version_file: Callable[[Path], str | None]


DISTRIBUTIONS: Mapping[str, _Known] = {
    "megatron-core": _Known("megatron.core", _megatron_core_version),
    "transformer-engine": _Known("transformer_engine", _transformer_engine_version),
    "torch": _Known("torch", _torch_version),
}


def _public(raw: str | None) -> str | None:
    version = parse_version(raw)
    return raw if version is None else version.public


def _same(a: Path, b: Path) -> bool:
    # The system knows no files inside a zip, so compare the paths first.
    if os.path.normpath(os.path.abspath(a)) == os.path.normpath(os.path.abspath(b)):
        return True
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False


def _describes(found: Recorded, package: Path, parts: list[str]) -> bool:
    """Whether the metadata is beside the package directory that an import would use."""
    return _same(Path(found.directory, *parts), package)


def _edits(found: Recorded, package: Path) -> bool:
    """Whether the metadata belongs to an editable install, which keeps it apart from the sources that it names."""
    if found.direct_url is None:
        return False

    try:
        record = json.loads(found.direct_url)
        # An install that copied the sources also names them, but is not editable.
        url = urlparse(str(record["url"])) if record["dir_info"]["editable"] is True else None
    except (ValueError, TypeError, KeyError):
        return False
    return url is not None and url.scheme == "file" and any(_same(Path(unquote(url.path)), p) for p in package.parents)


def _other_copies(known: _Known, package: Path, parts: list[str]) -> dict[str, str]:
    """Versions of other copies of the package on sys.path by directory, whether they have metadata or not."""
    found: dict[str, str] = {}
    for entry in sys.path:
        copy = Path(entry or os.curdir, *parts)
        if (copy / "__init__.py").is_file() and not _same(copy, package):
            found[os.path.realpath(entry)] = known.version_file(copy) or "a copy of unknown version"
    return found


def _location(sources: Sources, known: _Known) -> Path | None:
    path = sources.path(known.package)
    if path is not None:
        return Path(path).parent
    # Without __init__.py the package is a namespace, which an import also accepts. Any directory of that name is such a
    # namespace, so only one with a version file counts.
    places = map(Path, sources.namespace(known.package))
    return next((place for place in places if known.version_file(place) is not None), None)


def place_of(distribution: str, sources: Sources) -> str | None:
    """The directory of the package that `sources` find for a distribution. None if there is none."""
    found = _location(sources, DISTRIBUTIONS[distribution])
    return None if found is None else str(found)


def same_place(a: str, b: str) -> bool:
    """Whether two paths lead to one directory."""
    return a == b or _same(Path(a), Path(b))


def _installed(distribution: str, known: _Known, sources: Sources) -> Installed | None:
    package = _location(sources, known)
    if package is None:
        return None
    parts = known.package.split(".")
    written = known.version_file(package)
    mine: list[str] = []
    others = _other_copies(known, package, parts)
    editable = False
    for found in recorded(distribution):
        version = found.version
        if version is None:
            continue
        if _describes(found, package, parts):
            mine.append(version)
        elif _edits(found, package):
            mine.append(version)
            editable = True
        else:
            others[os.path.realpath(found.directory)] = version
    problems = [
        f"another copy is on sys.path, which an import would not use: {version} at {place}"
        for place, version in others.items()
    ]
    if len(set(mine)) > 1:
        problems.append(f"the metadata is there more than once: {', '.join(mine)}")
    stale = bool(mine and written) and _public(mine[0]) != _public(written)
    if stale:
        problems.append(f"metadata says {mine[0]}, the package's version file says {written}")
    # The metadata of an editable install is as old as the install. Its sources move on.
    use_metadata = bool(mine) and not (stale and editable)
    raw = mine[0] if use_metadata else written
    raw = None if raw is None else one_line(raw, VERSION_LIMIT)
    origin = "distribution metadata" if use_metadata else "version file" if written else "unknown"
    if raw is None:
        problems.append(f"no readable version in {package}; patches are chosen by the bodies alone")
    elif parse_version(raw) is None:
        problems.append(f"'{raw}' is not a PEP 440 version; patches are chosen by the bodies alone")
    return Installed(distribution, known.package, str(package), raw, origin, tuple(problems))


def detect(sources: Sources | None = None) -> Environment:
    """The installed releases. Imports neither torch nor megatron, runs none of their code, and starts no process.

    The version is that of the copy that an import would use, be it a source tree that shadows an installed copy. It
    comes from the distribution metadata of that copy, else from the version file in the package, read as text.
    """
    sources = sources or Sources()
    installed: dict[str, Installed] = {}
    for distribution, known in DISTRIBUTIONS.items():
        try:
            found = _installed(distribution, known, sources)
        except SourceError:
            found = None
        if found is not None:
            installed[distribution] = found
    return Environment(installed, sources)


# Installers' records, read from the metadata on sys.path. To import importlib.metadata takes longer than a whole plan,
# so directories are read here. Archives, and other finders that know distributions, are rare.


class Recorded(NamedTuple):
    """One installation: its version, the directory that its files are relative to, the text of its direct_url.json."""

    version: str | None
    directory: str
    direct_url: str | None


def recorded(distribution: str) -> Iterator[Recorded]:
    """Every installation of `distribution` with metadata on sys.path, in the order of sys.path."""
    others = [finder for finder in sys.meta_path if finder is not PathFinder and hasattr(finder, "find_distributions")]
    if others:
        yield from _by_importlib(distribution, sys.path)
        return
    for entry in sys.path:
        if os.path.isfile(entry):
            yield from _by_importlib(distribution, [entry])
        else:
            yield from _in_directory(distribution, entry or os.curdir)


def _in_directory(distribution: str, directory: str) -> Iterator[Recorded]:
    wanted = _normalised(distribution)
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        if not name.endswith((".dist-info", ".egg-info")):
            continue
        if _normalised(name.rpartition(".")[0].partition("-")[0]) == wanted:
            home = os.path.join(directory, name)
            text = _text(home, "METADATA") or _text(home, "PKG-INFO") or _text(home)
            yield Recorded(_version(text or ""), directory, _text(home, "direct_url.json"))


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _text(*parts: str) -> str | None:
    try:
        return read_beginning(os.path.join(*parts), METADATA_LIMIT).decode("utf-8")
    except (SourceError, UnicodeDecodeError):
        return None


def _version(text: str) -> str | None:
    """The version in the header of metadata. The header ends at the first empty line."""
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if not line.strip():
            return None
        if colon and key.strip().lower() == "version":
            return value.strip() or None
    return None


def _by_importlib(distribution: str, path: Sequence[str]) -> Iterable[Recorded]:
    from importlib import metadata

    for found in metadata.distributions(name=distribution, path=list(path)):
        try:
            version = found.metadata["Version"]
        except UnicodeDecodeError:
            version = None
        yield Recorded(version, str(found.locate_file("")), found.read_text("direct_url.json"))
