"""Which files of shim decide what is bound and computed, and a hash over them.

They are read anew for each plan whose digest is asked for. The RECORD of a wheel says what was installed, and not
what lies there now; to compare the two takes as long as to read the files.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from shim._matrix.load import PACKAGE, matrix_path, patches_path
from shim._matrix.pins import lock_path

__all__ = ["BESIDE", "ROOMS", "differing_parts", "file_digest", "files_below", "own_code", "own_files", "summary_of"]

# Every room of the package is in one of these lists. A part in neither counts.
ROOMS = (
    "_config_override",
    "_engine",
    "_matrix",
    "_planning",
    "_printing",
    "_releases",
    "_te",
    "_workers",
    "ops",
    "patches",
)
# The command line, the proofs and their runner, and the helpers of tests. A job that calls shim.apply() loads none of
# them, and no other room imports them.
BESIDE = ("__main__.py", "_proving", "_tools", "testing")
PROOFS = ("/proof.py", "/gpu_proof.py")

TEXT = (".py", ".json", ".yaml")
KINDS = (*TEXT, ".pyc", ".so", ".pyd")  # what an import or shim reads. Files of an editor do not count.
CACHE = "__pycache__"


def own_code() -> dict[str, str]:
    """16 hexadecimal digits for each part of shim: its rooms, and "shim" for what lies in none.

    The same for a wheel, an editable install and a source tree, and whatever ends the lines of a text.
    """
    hashes: dict[str, hashlib._Hash] = {}
    for name, file in own_files():
        room, inside, _ = name.partition("/")
        part = hashes.setdefault(room if inside else "shim", hashlib.sha256())
        part.update(f"{name} {file_digest(file)}\n".encode())
    return {part: hashed.hexdigest()[:16] for part, hashed in sorted(hashes.items())}


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
        if not name.endswith(PROOFS):
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
    return hashlib.sha256("".join(f"{name} {parts[name]}\n" for name in sorted(parts)).encode()).hexdigest()[:12]


def differing_parts(theirs: object, ours: Mapping[str, str]) -> list[str]:
    """The names of the parts that are not the same in both, or are in one of them only."""
    known = theirs if isinstance(theirs, Mapping) else {}
    return sorted(str(name) for name in {*known, *ours} if known.get(name) != ours.get(name))
