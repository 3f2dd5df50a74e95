"""Loading a matrix: its rules, the descriptions of its patches, its pins, and the fast form of all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from shim._errors import MatrixError, SourceError
from shim._matrix import compiled
from shim._matrix.model import Matrix
from shim._record import record
from shim._releases.detect import PATCHED
from shim._releases.files import UnsafeFileError, read_bounded, stamp_of
from shim._releases.sources import Sources, find_spec

__all__ = [
    "PATCH_FILE",
    "Described",
    "Descriptions",
    "check_modules",
    "compile_matrix",
    "load_matrix",
    "lock_path",
    "matrix_path",
    "patches_path",
    "read_content",
    "shipped_files",
]

TRUSTED = ("shim.patches",)  # packages whose modules any matrix can name
MAX_BYTES = 8_000_000  # of a matrix, and of its pins
PATCH_FILE = "patch.yaml"  # the description of a patch; the matrix says which release gets which variant of it
PACKAGE = Path(__file__).resolve().parents[1]


def matrix_path() -> Path:
    """The matrix that ships with shim: inside the wheel, or at the top of the source tree."""
    if not PACKAGE.is_dir():
        raise MatrixError(
            f"shim was imported from the archive {PACKAGE.parent}, and reads its matrix and patches as files. Remedy: "
            "install the wheel with pip, or unpack it"
        )
    inside = PACKAGE / "version_matrix.yaml"
    return inside if inside.exists() else PACKAGE.parent / "version_matrix.yaml"


def patches_path() -> Path:
    inside = PACKAGE / "patches"
    return inside if inside.is_dir() else PACKAGE.parent / "patches"


def _module_exists(module: str, shipped: bool) -> bool:
    """Whether the patch module exists. The shipped matrix may only name modules in shim.patches."""
    prefix = "shim.patches."
    names = module.removeprefix(prefix).split(".")
    if not all(name.isidentifier() for name in names):
        return False
    if module.startswith(prefix):
        place = os.path.join(patches_path(), *names)
        # Path.is_file raises for a name that is too long for the file system.
        return os.path.isfile(f"{place}.py") or os.path.isfile(os.path.join(place, "__init__.py"))
    return not shipped and find_spec(module) is not None


def lock_path(matrix: Path) -> Path:
    """The file of the pins of a matrix: matrix.lock.json beside matrix.yaml."""
    return matrix.with_suffix(".lock.json")


def load_matrix(
    path: str | os.PathLike[str] | None = None, *, check_ranges: bool | None = None, pins: bool = True
) -> Matrix:
    """Read and check a matrix (default: the one that ships with shim). MatrixError names file and line.

    check_ranges: search for gaps and overlaps of ranges. By default shim does so in every matrix but the shipped one.
        A test does it for that one, so that a plan need not.
    pins: False leaves the pins out, for a caller that writes them anew.

    Another matrix than the shipped one may name patch modules outside shim (see `check_modules`). MatrixError if
    others may write such a matrix.
    """
    file = Path(path) if path is not None else matrix_path()
    shipped = _is_shipped(file)
    # The shipped matrix needs no guard: who may write it may also write the code beside it.
    content = _bytes_of(file, guarded=not shipped)
    beside = lock_path(file)
    lock = (beside, _bytes_of(beside, guarded=not shipped)) if pins and beside.is_file() else None
    if shipped and lock is not None and not check_ranges and compiled.FILE.is_file():
        described = _described_digest() if _may_be_edited() else None
        found = _read_compiled(file, _digest(content, lock[1]), described, lock[1], stamp_of(str(compiled.FILE)))
        if found is not None:
            return found
    from shim._matrix.rules import read_matrix  # here, because it is slow to import

    ranges = check_ranges or (check_ranges is None and not shipped)
    descriptions = _descriptions()
    matrix = read_matrix(
        file,
        content,
        lock,
        module_exists=lambda m: _module_exists(m, shipped),
        descriptions=descriptions,
        check_ranges=ranges,
    )
    if shipped:
        return matrix
    parts = (content, *descriptions.contents.values(), b"" if lock is None else lock[1])
    return replace(matrix, content=hashlib.sha256(b"".join(parts)).hexdigest()[:16])


def read_content(
    file: Path, content: bytes, lock: tuple[Path, bytes] | None = None, *, check_ranges: bool = False
) -> Matrix:
    """The matrix in `content`, which may become that of `file`. Its patch modules need not be there.

    lock: the file of its pins, and the content that this may get.
    """
    from shim._matrix.rules import read_matrix  # here, because it is slow to import

    found_by, there = _descriptions(), lambda _: True
    return read_matrix(file, content, lock, module_exists=there, descriptions=found_by, check_ranges=check_ranges)


def _descriptions() -> Descriptions:
    """The finder and reader of patch.yaml. MatrixError if others may write that of a patch outside of shim."""
    return Descriptions(patches_path(), lambda file, guarded: _bytes_of(file, guarded=guarded))


def _digest(*contents: bytes) -> str:
    return hashlib.sha256(b"".join(contents)).hexdigest()


def _described_digest() -> str:
    """Over the description of each patch that ships with shim."""
    return _digest(*(_bytes_of(file, guarded=False) for file in shipped_files(patches_path())))


def _may_be_edited() -> bool:
    """Whether a patch.yaml may have changed since the fast form was made. Never in a wheel, which nobody edits.

    In a checkout the times of the files tell, so that the many files need not be read at each start.
    """
    if matrix_path().parent == PACKAGE:
        return False
    made = os.stat(compiled.FILE).st_mtime_ns
    return any(os.stat(file).st_mtime_ns >= made for file in shipped_files(patches_path()))


@lru_cache(maxsize=1)
def _read_compiled(file: Path, digest: str, described: str | None, lock: bytes, stamp: object) -> Matrix | None:
    """The fast form, parsed once for many plans in a process. `stamp` is that of its file: see stamp_of."""
    return compiled.read_compiled(file, digest, described, lock)


def compile_matrix() -> tuple[Path, str]:
    """The file with the fast form of the shipped matrix, and the text that belongs in it, made from the YAML."""
    file = matrix_path()
    lock = lock_path(file).read_bytes()
    matrix = load_matrix(check_ranges=True)
    return compiled.FILE, compiled.render_compiled(matrix, _digest(file.read_bytes(), lock), _described_digest(), lock)


def _bytes_of(file: Path, *, guarded: bool) -> bytes:
    """The content of `file`. MatrixError if it cannot be read or, if `guarded`, others may write it."""
    try:
        return read_bounded(file, MAX_BYTES, guarded=guarded)
    except UnsafeFileError as error:
        raise MatrixError(f"{file}:1: {error}") from None
    except (OSError, ValueError) as error:
        raise MatrixError(f"{file}:1: cannot be read: {error}") from None


def _is_shipped(file: Path) -> bool:
    try:
        return file.resolve() == matrix_path().resolve()
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a loop of links, before Python 3.13
        return False


def check_modules(matrix: Matrix, packages: Iterable[str]) -> None:
    """Raise MatrixError if a patch module lies neither in shim.patches nor in one of `packages`.

    shim imports the code that a matrix names. Writing a matrix, or setting MEGATRON_SHIM_MATRIX, must not be enough to
    have any code imported.
    """
    allowed = (*TRUSTED, *packages)
    for entry in matrix.patches.values():
        if not any(f"{entry.module}.".startswith(f"{package}.") for package in allowed):
            top, inside = entry.module.partition(".")[0], " and ".join(allowed)
            raise MatrixError(
                f"{matrix.path}:{entry.line}: {entry.id}: the module {entry.module} lies outside {inside}."
                f" Remedy: if you trust its code, name its package: shim.apply(packages=[{top!r}]), or --package {top}."
            )


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
