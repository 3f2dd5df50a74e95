"""The digest of a plan: over releases and matrix, bodies and options, and all code that decides what is bound.

Files of shim, of patches and of the packages that the caller names are read anew for each plan whose digest is asked
for. The RECORD of a wheel says what was installed, and not what lies there now; to compare the two takes as long.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shim._errors import SourceError
from shim._matrix.load import PACKAGE, lock_path, matrix_path, patches_path
from shim._matrix.model import Matrix
from shim._planning.decision import Decision
from shim._releases.detect import Environment
from shim._releases.sources import Sources
from shim._version import __version__

__all__ = [
    "BESIDE",
    "code_of_package",
    "code_of_patch",
    "differing_parts",
    "digest_of",
    "file_digest",
    "files_below",
    "identity_of",
    "own_code",
    "own_digests",
    "own_files",
    "summary_of",
]

SHIPPED = "shipped"  # stands for the hash of the matrix that ships


def identity_of(
    decisions: Mapping[str, Decision], matrix: Matrix, environment: Environment, packages: Iterable[str] = ()
) -> dict[str, Any]:
    """Plain data that is equal in two processes with the same files and arguments.

    Neither what they have imported nor what others have patched in them changes it.
    packages: those that the caller names; all their files count as soon as a patch lies outside of shim.patches.
    """
    own, patches, is_foreign = own_digests(), {}, False
    for id, decision in ((id, decision.without_conflict or decision) for id, decision in decisions.items()):
        if decision.wanted:
            module = matrix.patches[id].module
            is_foreign |= not module.startswith("shim.")
            patches[decision.id] = {
                "variant": decision.variant,
                "fingerprints": dict(decision.fingerprints),
                "options": _plain(decision.options),
                "module": module,
                "code": code_of_patch(module, own),
            }
    installed = {name: i.raw for name, i in environment.installed.items()}
    return {
        "releases": {"megatron-shim": __version__, **installed},
        "matrix": matrix.content or SHIPPED,
        "code": own_code(own),
        "packages": {name: code_of_package(name) for name in sorted(packages)} if is_foreign else {},
        "patches": patches,
    }


def digest_of(identity: Mapping[str, Any]) -> str:
    """16 hexadecimal digits over an identity."""
    return _hash_of([json.dumps(identity, sort_keys=True)])


def _hash_of(lines: Iterable[str]) -> str:
    """16 hexadecimal digits over lines, in whatever order: the one hash of this module."""
    text = "".join(f"{line}\n" for line in sorted(lines))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a file would give them back: what JSON does not know becomes text."""
    return json.loads(json.dumps(dict(options), default=str))


# Shim's own code, by its rooms

# Rooms that do not count: the command line and what it opens, the proofs and their runner, and the helpers of tests. A
# job that calls shim.apply() loads none of them, and no other room imports them.
BESIDE = ("__main__.py", "_archives", "_proving", "_tools", "testing")
PROOFS = re.compile(r"(^|/)((gpu_)?proof\.py|_proof_[^/]*|proved\.json)$")  # with what they share, and their results

TEXT = (".py", ".json", ".yaml")
KINDS = (*TEXT, ".pyc", ".so", ".pyd")  # what an import or shim reads. Files of an editor do not count.
ANY = ("",)  # a package that is named is hashed whole, whatever its files are for
CACHE = "__pycache__"


def own_code(digests: Mapping[str, str]) -> dict[str, str]:
    """16 hexadecimal digits for each part of shim: its rooms, and "shim" for what lies in none.

    The same for a wheel, an editable install and a source tree, and whatever ends the lines of a text.
    """
    parts: dict[str, list[str]] = {}
    for name, digest in digests.items():
        room, inside, _ = name.partition("/")
        parts.setdefault(room if inside else "shim", []).append(f"{name} {digest}")
    return {part: _hash_of(lines) for part, lines in sorted(parts.items())}


def own_digests() -> dict[str, str]:
    """The digest of each of `own_files`, by its name."""
    return {name: file_digest(file) for name, file in own_files()}


def own_files() -> list[tuple[str, str]]:
    """(name, path) of each file that counts, sorted. A name is that in an installed shim, with "/"."""
    rules = matrix_path()
    found = {rules.name: str(rules), lock_path(rules).name: str(lock_path(rules))}
    for name, file in files_below(str(PACKAGE)):
        top = name.partition("/")[0]
        # The fast form of the matrix is made from what counts, and is not read if it was not.
        if top not in BESIDE and top != "patches" and name != "_matrix/matrix.json":
            found[name] = file
    for name, file in files_below(str(patches_path())):
        if not PROOFS.search(name):
            found[f"patches/{name}"] = file
    return sorted(found.items())


def files_below(directory: str, kinds: tuple[str, ...] = KINDS) -> Iterator[tuple[str, str]]:
    """(name, path) of each file below a directory that ends in one of `kinds`, also by way of links; each once."""
    waiting, seen = [(directory, "")], set()
    while waiting:
        place, prefix = waiting.pop()
        try:
            with os.scandir(place) as entries:
                found = list(entries)
            identity = os.stat(place)
        except OSError:
            continue
        if (identity.st_dev, identity.st_ino) in seen:  # a loop of links
            continue
        seen.add((identity.st_dev, identity.st_ino))
        for entry in found:
            if entry.name.startswith(".") or entry.name == CACHE:
                continue
            if entry.is_dir():
                waiting.append((entry.path, f"{prefix}{entry.name}/"))
            elif entry.name.endswith(kinds):
                yield prefix + entry.name, entry.path


def file_digest(path: str | Path) -> str:
    """64 hexadecimal digits over a regular file, of a text whatever ends its lines; or why it cannot be read."""
    hashed = hashlib.sha256()
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # to open a device can have an effect, and a pipe would wait
            return "unreadable: not a regular file"
        with open(path, "rb", buffering=0) as file:
            held = b""
            read = True
            while read or held:
                content = file.read(1 << 20)
                read, part = bool(content), held + content
                held = b"\r" if read and part.endswith(b"\r") else b""  # a line end may be cut in two
                hashed.update(_with_line_ends(part[: len(part) - len(held)], str(path)))
    except OSError as error:
        return f"unreadable: {type(error).__name__}"
    return hashed.hexdigest()


def _with_line_ends(content: bytes, path: str) -> bytes:
    return content.replace(b"\r\n", b"\n") if b"\r" in content and path.endswith(TEXT) else content


def summary_of(parts: Mapping[str, str]) -> str:
    """12 hexadecimal digits over what `own_code` returns."""
    return _hash_of(f"{name} {digest}" for name, digest in parts.items())[:12]


def differing_parts(theirs: object, ours: Mapping[str, str]) -> list[str]:
    """The names of the parts that are not the same in both, or are in one of them only."""
    known = theirs if isinstance(theirs, Mapping) else {}
    return sorted(str(name) for name in {*known, *ours} if known.get(name) != ours.get(name))


# The code of patches


def code_of_patch(module: str, own: Mapping[str, str]) -> str:
    """A hash over the files of a patch: its folder or file. own: what `own_digests` returns.

    What they import from shim is in the hash of the room that it lies in, and what they import from the packages that
    the caller names in those of the packages.
    """
    names = module.split(".")
    if names[:2] != ["shim", "patches"]:
        return code_of_package(module)
    place = "/".join(names[1:])
    return _hash_of(f"{name} {own[name]}" for name in own if name.startswith(f"{place}/") or name == f"{place}.py")


def code_of_package(package: str) -> str:
    """A hash over all files of a package or module, by their places in it, or over the zip that it lies in."""
    sources = Sources()
    try:
        file = sources.path(package)
        places = sources.namespace(package)
    except SourceError:
        file, places = None, []
    if file is not None and os.path.basename(file).startswith("__init__."):
        places = [os.path.dirname(file)]
    lines: set[str] = set()
    for place in places or [file or ""]:
        files = files_below(place, ANY) if os.path.isdir(place) else [(package, place)]
        lines |= {f"{name} {file_digest(_or_its_zip(path))}" for name, path in files}
    return _hash_of(lines)


def _or_its_zip(path: str) -> str:
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path
