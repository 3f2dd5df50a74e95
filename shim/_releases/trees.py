"""Releases to audit without installing them: a wheel, a directory, a checkout, or a name to download."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from packaging.utils import canonicalize_name

from shim._errors import OptionError, SourceError
from shim._record import Record
from shim._releases.detect import (
    DISTRIBUTIONS,
    PATCHED,
    VERSION_FILE_LIMIT,
    Environment,
    Installed,
    version_in_package_info,
)
from shim._releases.sources import Sources
from shim._releases.versions import parse_version
from shim._releases.wheels import WheelSources

__all__ = ["Tree", "open_tree"]

REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.+!_-]+)")
VERSION_LIMIT = 100  # characters

Fetch = Callable[[str, str], Path]  # distribution and release -> the directory it is unpacked in


class Tree(Record):
    """The releases at one place. `environment` holds nothing else. Nothing of them is ever imported or run."""

    name: str
    environment: Environment


def open_tree(target: str, fetch: Fetch) -> Tree:
    """Find releases at `target`: ``megatron-core==0.19.2``, a wheel file, or a directory.

    A directory may be a git checkout, a source tree as trainers put it on PYTHONPATH, a package in it
    (``.../megatron/core``), or site-packages. Raises OptionError where there is nothing to audit.
    """
    named = REQUIREMENT.fullmatch(target)
    if named:
        distribution = canonicalize_name(named[1])
        if distribution not in PATCHED:
            raise OptionError(f"{named[1]} is not audited; known are {', '.join(PATCHED)}")
        if parse_version(named[2]) is None:
            raise OptionError(f"{named[2]} is not a version")
        return _in_directory(target, fetch(distribution, named[2]))
    path = os.path.abspath(target) if "\0" not in target else ""
    if os.path.isdir(path):
        return _in_directory(target, _root_of(Path(path)) or _root_of(Path(path).resolve()) or Path(path))
    if os.path.isfile(path):
        return _in_wheel(target, Path(path))
    raise OptionError(
        f"there is nothing to audit at {target!r}: name a release (megatron-core==0.19.2), a wheel file, or a directory"
    )


def _root_of(path: Path) -> Path | None:
    """The directory to put on PYTHONPATH for the package at or above `path`. None where there is no package."""
    for root in (path, *path.parents[:2]):
        inside = path.relative_to(root).parts
        packages = [DISTRIBUTIONS[name].package for name in PATCHED]
        if any(inside == tuple(p.split("."))[: len(inside)] and Sources([root]).path(p) for p in packages):
            return root
    return None


def _in_directory(name: str, root: Path) -> Tree:
    metadata = {path.parent.name: _beginning(path) for path in sorted(root.glob("*.dist-info/METADATA"))}
    written = _beginning(root / "build_tools" / "VERSION.txt").strip()  # of a checkout of Transformer Engine
    return _tree(name, str(root), Sources([root]), metadata, written)


def _in_wheel(name: str, path: Path) -> Tree:
    try:
        sources = WheelSources(path)
    except SourceError as error:
        raise OptionError(str(error)) from None
    members = [m for m in sources.members if m.endswith(".dist-info/METADATA") and m.count("/") == 1]
    metadata = {member.split("/")[0]: _beginning_in(sources, member) for member in members}
    return _tree(name, str(path), sources, metadata, "")


def _beginning_in(wheel: WheelSources, member: str) -> str:
    try:
        return wheel.beginning(member, VERSION_FILE_LIMIT).decode("utf-8", "replace")
    except SourceError:
        return ""


def _beginning(path: Path) -> str:
    try:
        if not os.path.isfile(path):
            return ""
        with path.open("rb") as file:
            return file.read(VERSION_FILE_LIMIT).decode("utf-8", "replace")
    except OSError:
        return ""


def _tree(name: str, place: str, sources: Sources, metadata: Mapping[str, str], written: str) -> Tree:
    installed: dict[str, Installed] = {}
    for distribution in PATCHED:
        package = DISTRIBUTIONS[distribution].package
        if sources.path(package) is None:
            continue
        texts = [text for info, text in metadata.items() if canonicalize_name(info.partition("-")[0]) == distribution]
        version, origin = next(filter(None, map(_stated_version, texts)), None), "distribution metadata"
        if version is None:
            version, origin = _written_version(package, sources) or written or None, "version file"
        version = _printable(version)
        origin = origin if version else "unknown"
        installed[distribution] = Installed(distribution, package, place, version, origin)
    if not installed:
        raise OptionError(f"{name}: neither megatron/core nor transformer_engine is in there")
    return Tree(name, Environment(installed, sources))


def _printable(version: str | None) -> str | None:
    """The version without line ends and control characters, cut to VERSION_LIMIT, because reports show it."""
    return "".join(filter(str.isprintable, version or ""))[:VERSION_LIMIT] or None


def _stated_version(metadata: str) -> str | None:
    headers = itertools.takewhile(str.strip, metadata.splitlines())  # the description begins after an empty line
    stated = (line.partition(":")[2].strip() for line in headers if line.lower().startswith("version:"))
    return next(stated, None)


def _written_version(package: str, sources: Sources) -> str | None:
    try:
        return version_in_package_info(sources.text(f"{package}.package_info"))
    except SourceError:
        return None
