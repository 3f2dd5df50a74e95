"""Releases to audit without installing them: a directory, a wheel, an sdist, a commit, or a name to download."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from packaging.utils import canonicalize_name

from shim._archives.git_commits import is_bare, open_commit
from shim._archives.packed import JoinedSources, PackedSources, open_archive, roots_of
from shim._errors import OptionError, SourceError
from shim._printing.printable import one_line
from shim._record import record
from shim._releases.detect import (
    DISTRIBUTIONS,
    PATCHED,
    VERSION_FILE_LIMIT,
    VERSION_LIMIT,
    Environment,
    Installed,
    version_in_package_info,
)
from shim._releases.sources import Sources
from shim._releases.versions import parse_version

__all__ = ["Tree", "beside", "open_tree"]

REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)?==([A-Za-z0-9.+!_-]+)")
COMMIT_NAME = re.compile(r"[0-9a-f]{10}")  # as the matrix names the commits that it knows
BARE = re.compile(r"[0-9]+(?:\.[0-9]+)+[A-Za-z0-9.+!_-]*")  # 0.19.2, which means ==0.19.2
LIKE_REQUIREMENT = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]*)?\s*(?:[<>~!=]=?|===)\s*[0-9].*")
URL = re.compile(r"(?:[a-z][a-z0-9+.-]*://|git@).*", re.IGNORECASE)
HEADS = [f"{DISTRIBUTIONS[distribution].package.replace('.', '/')}/__init__.py" for distribution in PATCHED]
FORMS = "a release (megatron-core==0.19.2), a wheel, an sdist (.tar.gz or .zip), or a directory"

Fetch = Callable[[str, str], Path]  # distribution and release -> the directory it is unpacked in


@record
class Tree:
    """The releases at one place. `environment` holds nothing else. Nothing of them is ever imported or run.

    commit: 40 hexadecimal digits, if git or the archive names a commit.
    """

    name: str
    environment: Environment
    commit: str = ""


def open_tree(target: str, fetch: Fetch, ref: str | None = None) -> Tree:
    """Find releases at `target`: ``megatron-core==0.19.2``, ``0.19.2``, a wheel, an sdist, or a directory.

    A directory may be a git checkout, a source tree as trainers put it on PYTHONPATH, a package in it
    (``.../megatron/core``), or site-packages. With `ref` it is a git directory, and git reads that commit.
    Raises OptionError if there is nothing to audit. The message names the remedy.
    """
    named = REQUIREMENT.fullmatch(target) or (BARE.fullmatch(target) and REQUIREMENT.fullmatch(f"=={target}"))
    path = os.path.abspath(target) if target and "\0" not in target else ""
    if named and os.path.exists(path):  # ./0.19.2, or a directory of that name
        named = None
    if ref is not None:
        if named or not os.path.isdir(path):
            raise OptionError(f"--ref belongs to a git directory, and {target!r} is no directory")
        return _commit(target, Path(path), ref)
    if named:
        return _release(target, named[1] or "megatron-core", named[2], fetch)
    if os.path.isdir(path):
        return _in_directory(target, _root_of(Path(path)) or _root_of(Path(path).resolve()) or Path(path))
    if os.path.isfile(path):
        return _in_archive(target, path)
    raise OptionError(f"there is nothing to audit at {target!r}: {_instead(target)}")


def beside(tree: Tree, others: Iterable[Tree]) -> Environment:
    """The packages of `tree`, and those of `others` that it lacks. OptionError if one of them adds nothing."""
    installed = dict(tree.environment.installed)
    places: dict[str, Sources] = {i.package: tree.environment.sources for i in installed.values()}
    for other in others:
        new = {name: i for name, i in other.environment.installed.items() if name not in installed}
        if not new:
            have = " and ".join(other.environment.installed)
            raise OptionError(
                f"--with {other.name}: {have} is there already; name the other distribution, and each once"
            )
        installed |= new
        places |= {i.package: other.environment.sources for i in new.values()}
    return replace(tree.environment, installed=installed, sources=JoinedSources(places))


def _instead(target: str) -> str:
    """The forms of a target, for a message about an unusable one."""
    name = canonicalize_name(target)
    if URL.fullmatch(target):
        return (
            "no URL is fetched; clone it and name the directory with --ref, or download the archive and name the file"
        )
    if name in PATCHED:
        return f"say which release, for instance {name}==X, or ./{target} for a directory"
    if LIKE_REQUIREMENT.fullmatch(target):
        return "name one release with ==, for instance megatron-core==0.19.2"
    if re.fullmatch(r"[0-9a-f]{7,40}|main|dev|(?:core_)?v?[0-9]\S*|core_\S+", target):
        return f"a commit, branch or tag is named beside its git directory: shim audit DIRECTORY --ref {target}"
    there = "there is no such file; " if re.search(r"/|\.(whl|zip|tar|t?gz)$", target) else ""
    return f"{there}name {FORMS}"


def _release(target: str, name: str, release: str, fetch: Fetch) -> Tree:
    distribution = canonicalize_name(name)
    if distribution not in PATCHED:
        raise OptionError(f"{name} is not audited; name {' or '.join(f'{known}=={release}' for known in PATCHED)}")
    if parse_version(release) is None and not COMMIT_NAME.fullmatch(release):
        raise OptionError(f"{release} is not a version; name one release, for instance {distribution}==0.19.2")
    return _in_directory(target if target != f"=={release}" else distribution + target, fetch(distribution, release))


def _root_of(path: Path) -> Path | None:
    """The directory to put on PYTHONPATH for the package at or above `path`. None if there is no package."""
    for root in (path, *path.parents[:2]):
        inside = path.relative_to(root).parts
        packages = [DISTRIBUTIONS[name].package for name in PATCHED]
        if any(inside == tuple(p.split("."))[: len(inside)] and Sources([root]).path(p) for p in packages):
            return root
    return None


def _in_directory(name: str, root: Path) -> Tree:
    metadata = {path.parent.name: _beginning(path) for path in sorted(root.glob("*.dist-info/METADATA"))}
    written = _beginning(root / "build_tools" / "VERSION.txt").strip()  # of a checkout of Transformer Engine
    found = _tree(name, str(root), Sources([root]), {**metadata, **_sdist(_beginning(root / "PKG-INFO"))}, written)
    if found is not None:
        return found
    if is_bare(root):
        raise OptionError(f"{name} is a git directory without files; say which commit: --ref main, for instance")
    raise OptionError(f"{name}: {_nothing(_below(root))}")


def _below(root: Path) -> Iterable[str]:
    """The directories in `root` that hold a package."""
    try:
        entries = [entry.name for entry in itertools.islice(os.scandir(root), 1000)]
    except OSError:
        return
    for name, head in itertools.product(entries, HEADS):
        if os.path.isfile(root / name / head):
            yield name


def _in_archive(name: str, path: str) -> Tree:
    try:
        return _packed(name, path, open_archive(path))
    except SourceError as error:
        raise OptionError(f"{error}; name {FORMS}") from None


def _commit(name: str, directory: Path, ref: str) -> Tree:
    sources = open_commit(directory, ref)
    return _packed(f"{name} at {ref}", sources.place, sources)


def _packed(name: str, place: str, sources: PackedSources) -> Tree:
    """The tree in an archive or a commit, at the first of its roots that has a package."""
    known = {m[: -len(head)] for head in HEADS for m in sources.members if m.endswith(head)}
    found = [root for root in sources.roots or roots_of(sorted(known)) if root in known]
    if not found:
        raise OptionError(f"{name}: {_nothing(root.rstrip('/') for root in known)}")
    if not sources.roots and found[0] and len(found) > 1:
        places = " and in ".join(one_line(root) or "?" for root in found[:5])
        raise OptionError(f"{name} has the packages in {places}; unpack it and name one directory")
    sources.root = root = found[0]
    metadata = {
        m[len(root) :].split("/")[0]: _beginning_in(sources, m)
        for m in sources.members
        if m.startswith(root) and m.endswith(".dist-info/METADATA") and m.count("/") == root.count("/") + 1
    }
    metadata |= _sdist(_beginning_in(sources, f"{root}PKG-INFO"))
    tree = _tree(name, place, sources, metadata, _beginning_in(sources, f"{root}build_tools/VERSION.txt").strip())
    assert tree is not None, "a root has a package"
    return replace(tree, commit=sources.commit)


def _nothing(elsewhere: Iterable[str]) -> str:
    nothing = "neither megatron/core nor transformer_engine is in there"
    places = sorted({one_line(place) or "?" for place in elsewhere})
    return f"{nothing}, but in {', '.join(places[:5])}; name that directory" if places else f"{nothing}; name {FORMS}"


def _beginning_in(archive: PackedSources, member: str) -> str:
    try:
        return archive.member(member)[:VERSION_FILE_LIMIT].decode("utf-8", "replace")
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


def _sdist(info: str) -> dict[str, str]:
    """The metadata of an sdist by the name in it."""
    name = _stated(info, "name")
    return {name: info} if name else {}


def _tree(name: str, place: str, sources: Sources, metadata: Mapping[str, str], written: str) -> Tree | None:
    """The tree of the packages in `sources`. None if there is none. `metadata` is by directory or by name."""
    installed: dict[str, Installed] = {}
    for distribution in PATCHED:
        package = DISTRIBUTIONS[distribution].package
        if sources.path(package) is None:
            continue
        texts = [text for info, text in metadata.items() if _is_of(info, distribution)]
        version = next(filter(None, (_stated(text, "version") for text in texts)), None)
        origin = "distribution metadata"
        if version is None:
            version, origin = _written_version(package, sources) or written or None, "version file"
        version = one_line(version or "", VERSION_LIMIT) or None  # because reports show it
        origin = origin if version else "unknown"
        installed[distribution] = Installed(distribution, package, place, version, origin)
    return Tree(name, Environment(installed, sources)) if installed else None


def _is_of(info: str, distribution: str) -> bool:
    """Whether metadata of this name, with or without a version and suffix, is that of `distribution`."""
    return distribution in (canonicalize_name(info), canonicalize_name(info.partition("-")[0]))


def _stated(metadata: str, header: str) -> str | None:
    headers = itertools.takewhile(str.strip, metadata.splitlines())  # the description begins after an empty line
    stated = (line.partition(":")[2].strip() for line in headers if line.lower().startswith(f"{header}:"))
    return next(stated, None)


def _written_version(package: str, sources: Sources) -> str | None:
    try:
        return version_in_package_info(sources.text(f"{package}.package_info"))
    except SourceError:
        return None
