"""The digest of a plan: over releases and matrix, bodies and options, and all code that decides what is bound.

Files of shim, of patches and of the packages that the caller names are read anew for each plan whose digest is asked
for. The RECORD of a wheel says what was installed, and not what lies there now; to compare the two takes as long.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shim._errors import SourceError
from shim._matrix.load import PACKAGE, matrix_path, patches_path
from shim._matrix.model import Matrix
from shim._matrix.pins import lock_path
from shim._planning.decision import Decision
from shim._releases.detect import Environment
from shim._releases.sources import Sources
from shim._version import __version__

__all__ = [
    "BESIDE",
    "ROOMS",
    "Code",
    "code_of_package",
    "differing_parts",
    "digest_of",
    "file_digest",
    "files_below",
    "identity_of",
    "own_code",
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
    code, patches, is_foreign = Code(packages), {}, False
    for id, decision in ((id, decision.without_conflict or decision) for id, decision in decisions.items()):
        if decision.wanted:
            module = matrix.patches[id].module
            is_foreign |= not module.startswith("shim.")
            patches[decision.id] = {
                "variant": decision.variant,
                "fingerprints": dict(decision.fingerprints),
                "options": _plain(decision.options),
                "module": module,
                "code": code.of(module),
                "own": code.own(module),
            }
    installed = {name: i.raw for name, i in environment.installed.items()}
    return {
        "releases": {"megatron-shim": __version__, **installed},
        "matrix": matrix.content or SHIPPED,
        "code": own_code(),
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


def _lines(digests: Mapping[str, str]) -> list[str]:
    return [f"{name} {digest}" for name, digest in digests.items()]


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a file would give them back: what JSON does not know becomes text."""
    return json.loads(json.dumps(dict(options), default=str))


# Shim's own code, by its rooms

# Every room of the package is in one of these lists. A part in neither counts.
ROOMS = (
    "_config_override",
    "_configs",
    "_engine",
    "_matrix",
    "_offload",
    "_planning",
    "_printing",
    "_releases",
    "_te",
    "_workers",
    "ops",
    "patches",
)
# The command line and what it opens, the proofs and their runner, and the helpers of tests. A job that calls
# shim.apply() loads none of them, and no other room imports them.
BESIDE = ("__main__.py", "_archives", "_proving", "_tools", "testing")
PROOFS = re.compile(r"(^|/)((gpu_)?proof\.py|_proof_[^/]*|proved\.json)$")  # with what they share, and their results

TEXT = (".py", ".json", ".yaml")
KINDS = (*TEXT, ".pyc", ".so", ".pyd")  # what an import or shim reads. Files of an editor do not count.
CACHE = "__pycache__"


def own_code() -> dict[str, str]:
    """16 hexadecimal digits for each part of shim: its rooms, and "shim" for what lies in none.

    The same for a wheel, an editable install and a source tree, and whatever ends the lines of a text.
    """
    parts: dict[str, list[str]] = {}
    for name, file in own_files():
        room, inside, _ = name.partition("/")
        parts.setdefault(room if inside else "shim", []).append(f"{name} {file_digest(file)}")
    return {part: _hash_of(lines) for part, lines in sorted(parts.items())}


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
    return _hash_of(_lines(parts))[:12]


def differing_parts(theirs: object, ours: Mapping[str, str]) -> list[str]:
    """The names of the parts that are not the same in both, or are in one of them only."""
    known = theirs if isinstance(theirs, Mapping) else {}
    return sorted(str(name) for name in {*known, *ours} if known.get(name) != ours.get(name))


# The code of patches

PACKAGE_FILE = "__init__.py"
# In shim's own modules import statements are found in the text, because parsing takes a hundred times as long. A false
# match does no harm, and what this misses is in the hash over all of shim.
IMPORT = rb"^[ \t]*(?:from[ \t]+((?:\.|shim\b)[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]+)|import[ \t]+([^\n#]+))"
DOTTED = re.compile(r"\.*[^\W\d]\w*(?:\.[^\W\d]\w*)*")
ANY = ("",)  # A package that is named is hashed whole, whatever its files are for.


class Code:
    """The code of patch modules. Each file is read once.

    packages: those that the caller names besides shim.patches.
    """

    def __init__(self, packages: Iterable[str] = ()) -> None:
        self._sources = Sources()
        self._tops = {"shim", *(package.partition(".")[0] for package in packages)}
        self._files: dict[str, str | None] = {}
        self._digests: dict[str, str | None] = {}
        self._imports: dict[str, list[str]] = {}
        self._found: dict[str, dict[str, str]] = {}

    def of(self, module: str) -> str:
        """A hash over a patch module and all modules that it imports, directly or not, of shim, of its own top-level
        package, and of those of the named packages. Parents count, because an import also runs them."""
        return _hash_of(_lines(self._digests_of(module)))

    def own(self, module: str) -> str:
        """A hash over those of these modules that lie in the patch module, so that no other patch shares them."""
        found = self._digests_of(module)
        return _hash_of(_lines({name: found[name] for name in found if f"{name}.".startswith(f"{module}.")}))

    def _digests_of(self, module: str) -> dict[str, str]:
        """The digest of each of these modules, by name."""
        if module in self._found:
            return self._found[module]
        found = self._found[module] = {}
        tops = self._tops | {module.partition(".")[0]}
        seen: set[str] = set()
        waiting = list(_with_parents(module))
        while waiting:
            name = waiting.pop()
            if name in seen or name.partition(".")[0] not in tops:
                continue
            seen.add(name)
            digest = self._digest(name)
            if digest is not None:  # else no module, but a namespace, or a name in a module
                found[name] = digest
            if digest is not None and not name.startswith("shim._"):  # these are of another part of shim
                waiting += (part for imported in self._imported(name) for part in _with_parents(imported))
        return found

    def _digest(self, name: str) -> str | None:
        if name not in self._digests:
            file = self._file(name)
            self._digests[name] = None if file is None else _digest_of(file)
        return self._digests[name]

    def _file(self, name: str) -> str | None:
        if name not in self._files:
            parent = name.rpartition(".")[0]
            above = self._file(parent) if parent and parent != "shim" else None
            # Below a module that is no package there is no module, but a function or a class.
            holds = above is None or os.path.basename(above).startswith("__init__.")
            self._files[name] = _found(name, self._sources) if holds else None
        return self._files[name]

    def _imported(self, name: str) -> list[str]:
        if name not in self._imports:
            file = self._file(name) or ""
            if name.partition(".")[0] == "shim":
                found = _imports_in_text(_content(file), name)
            else:
                found = self._imports_in_tree(name, os.path.basename(file) == PACKAGE_FILE)
            self._imports[name] = list(dict.fromkeys(found))
        return self._imports[name]

    def _imports_in_tree(self, name: str, is_package: bool) -> Iterator[str]:
        """Imports that a module may make: all its import statements, and texts that look like a module."""
        try:
            nodes = list(ast.walk(self._sources.tree(name)))
        except SourceError:  # no source, or damaged: what it imports is not known, but its content is hashed
            return
        finally:
            self._sources.forget_trees()
        package = name if is_package else name.rpartition(".")[0]
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                start = _absolute("." * node.level + (node.module or ""), package)
                yield start
                for alias in node.names:
                    # `from package import *` imports what its __all__ lists, modules too.
                    yield from [f"{start}.{alias.name}"] if alias.name != "*" else self._modules_in(start)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _may_be_module(node.value):
                yield _absolute(node.value, package)

    def _modules_in(self, package: str) -> Iterator[str]:
        file = self._file(package)
        places = self._sources.namespace(package) if file is None else [os.path.dirname(file)]
        if file is not None and not os.path.basename(file).startswith("__init__."):
            return
        for place in places if package.partition(".")[0] != "shim" else ():
            try:
                names = os.listdir(place)
            except OSError:
                continue
            yield from (f"{package}.{name.partition('.')[0]}" for name in names if not name.startswith(("_", ".")))


def code_of_package(package: str) -> str:
    """A hash over all files of a package or module, by their places in it, or in the zip that it lies in."""
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
        lines |= {f"{name} {_digest_of(path)}" for name, path in files}
    return _hash_of(lines)


def _may_be_module(text: str) -> bool:
    """Whether a text may name a module, as in import_module("package.helper"), and in all else that imports by name."""
    return "." in text and len(text) < 1000 and DOTTED.fullmatch(text) is not None


def _digest_of(path: str) -> str:
    """`file_digest`, and for what lies in a zip that of the whole zip."""
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return file_digest(path)


def _content(file: str) -> bytes:
    try:
        with open(file, "rb") as opened:
            return opened.read()
    except OSError:
        return b""


def _with_parents(name: str) -> Iterator[str]:
    """A module and its packages, of which an import runs each."""
    if name.startswith("shim."):  # whose packages are in the hash over all of shim
        return iter((name,))
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _absolute(name: str, package: str) -> str:
    """A name that may begin with dots, as an import in `package` takes it. "" if it leads out of all packages."""
    rest = name.lstrip(".")
    level = len(name) - len(rest)
    if not level:
        return name
    parents = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*parents, *([rest] if rest else [])]) if parents else ""


def _imports_in_text(content: bytes, name: str) -> Iterator[str]:
    """Names in the import statements of shim's module `name` that may be modules of shim."""
    text = content.replace(b"\r\n", b"\n").replace(b"\\\n", b" ")
    for origin, names, modules in re.findall(IMPORT, text, re.M):
        listed = (item.split()[0].decode() for item in (names or modules).strip(b"()").split(b",") if item.split())
        if not origin:
            yield from listed
            continue
        start = _absolute(origin.decode(), name.rpartition(".")[0])
        yield start
        yield from (f"{start}.{item}" for item in listed)


def _found(name: str, sources: Sources) -> str | None:
    """The file of a module, which is not imported. shim's own modules are found by their place, without a finder."""
    top, *names = name.split(".")
    if top != "shim":
        try:
            return sources.path(name)
        except SourceError:
            return None
    base = os.path.join(patches_path(), *names[1:]) if names[:1] == ["patches"] else os.path.join(PACKAGE, *names)
    return next((file for file in (f"{base}.py", os.path.join(base, PACKAGE_FILE)) if os.path.isfile(file)), None)
