"""Hashes over the code of patches: what a patch module imports, and all files of the packages that the caller names."""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping

from shim._errors import SourceError
from shim._matrix.load import PACKAGE, patches_path
from shim._planning.own_code import file_digest, files_below
from shim._releases.sources import Sources

__all__ = ["Code", "code_of_package"]

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
        return _hash_of(self._digests_of(module))

    def own(self, module: str) -> str:
        """A hash over those of these modules that lie in the patch module, so that no other patch shares them."""
        found = self._digests_of(module)
        return _hash_of({name: found[name] for name in found if f"{name}.".startswith(f"{module}.")})

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


def _hash_of(digests: Mapping[str, str]) -> str:
    """16 hexadecimal digits over the digests of modules."""
    return hashlib.sha256("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()[:16]


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
        lines |= {f"{name} {_digest_of(path)}\n" for name, path in files}
    return hashlib.sha256("".join(sorted(lines)).encode("utf-8", "surrogateescape")).hexdigest()[:16]


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
