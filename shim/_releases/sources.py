"""Locating and reading the source of a module, without importing it or its parents."""

from __future__ import annotations

import ast
import hashlib
import io
import os
import sys
import threading
import tokenize
import warnings
import zipimport
import zlib
from collections.abc import Callable, Iterable
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from importlib.util import decode_source, spec_from_file_location
from pathlib import Path
from typing import Any, TypeVar

from shim._errors import SourceError
from shim._releases.files import read_beginning, source_of, stamp_of
from shim._threads import renew_in_children

__all__ = [
    "MAX_SOURCE_BYTES",
    "Sources",
    "file_of",
    "find_spec",
    "is_ours",
    "parse",
    "search_path",
]

UNCOMPILED = (SyntaxError, ValueError, EOFError, zlib.error, RecursionError, MemoryError)
T = TypeVar("T")
# Arguments: the digest of a file, its module, a name in it, and whether the name may be missing.
Known = Callable[[str, str, str, bool], "str | None"]

# Parsing takes time and memory in proportion. The largest file of any release has less than 400 kB.
MAX_SOURCE_BYTES = 1_000_000
# The encodings of sources. A file can name other codecs, some of which unpack it or take quadratic time.
ENCODINGS = ("utf-8", "utf-8-sig", "ascii", "iso-8859-1", "cp1252")

PYTHONS_OWN = (BuiltinImporter, FrozenImporter, PathFinder)

# Two things of ast.parse concern the whole process: the warning filters that catch_warnings changes and puts back, and
# the recursion depth, which is miscounted if two threads build nodes at once (SystemError, seen on Python 3.11). A
# signal handler or finalizer of the parsing thread may also parse.
PARSING = threading.RLock()
renew_in_children(sys.modules[__name__], "PARSING", threading.RLock)


def parse(text: str) -> ast.Module:
    """The syntax tree of `text`. Warnings are ignored: they are upstream's, and must not raise under -W error."""
    with PARSING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def is_ours(finder: object) -> bool:
    """Whether `finder` is shim's own import hook, which must not take part in a search."""
    return getattr(finder, "is_shim_finder", False) is True


def _locations(spec: ModuleSpec | None) -> list[str]:
    if spec is None or spec.submodule_search_locations is None:
        return []
    return list(spec.submodule_search_locations)


def _origin(spec: ModuleSpec | None) -> str | None:
    return spec.origin if spec is not None and spec.has_location else None


def search_path(package: str, searched: dict[str, list[str]] | None = None) -> list[str]:
    """The directories to search for submodules of `package`. Empty if there is no such package.

    `searched` keeps the directories of packages that are not imported, for the next search.
    """
    loaded = sys.modules.get(package)
    if loaded is not None:
        try:
            return list(object.__getattribute__(loaded, "__path__"))
        except AttributeError:
            return []
    if searched is None:
        return _locations(find_spec(package))
    if package not in searched:
        searched[package] = _locations(find_spec(package, searched=searched))
    return searched[package]


def _nested_namespace(module: str, path: list[str]) -> ModuleSpec:
    spec = ModuleSpec(module, None, is_package=True)
    name = module.rpartition(".")[2]
    spec.submodule_search_locations = [os.path.join(entry, name) for entry in path if _has_folder(entry, name)]
    return spec


def _has_folder(entry: str, name: str) -> bool:
    """Whether an entry of a path, on disk or in a zip, has a folder that is a part of a namespace package."""
    if os.path.isdir(entry) or not os.path.isabs(entry):
        return os.path.isdir(os.path.join(entry, name))
    try:
        found = zipimport.zipimporter(entry).find_spec(name)
    except ImportError:  # there is no such zip
        return False
    return found is not None and found.loader is None


def _editable(finder: Any, module: str) -> ModuleSpec | None:
    """The spec of a module that ``pip install -e`` has mapped, read from the table in its finder."""
    cls = finder if issubclass(type(finder), type) else type(finder)
    place = None
    if cls.__module__.startswith("__editable__") and cls.__module__ in sys.modules:  # setuptools
        place = vars(sys.modules[cls.__module__]).get("MAPPING", {}).get(module)
    elif cls.__module__ == "editables.redirector":  # hatchling, pdm
        place = vars(cls).get("_redirections", {}).get(module)
    if place is None:
        return None
    candidates = (os.path.join(place, "__init__.py"), f"{place}.py", place)
    file = next((candidate for candidate in candidates if os.path.isfile(candidate)), None)
    return spec_from_file_location(module, file)


def find_spec(module: str, *, searched: dict[str, list[str]] | None = None) -> ModuleSpec | None:
    """The spec that an import of `module` would use. Imports nothing, not even a parent.

    Asks only Python's own finders, and reads the tables of editable installs. Other finders, such as post-import hooks,
    may import the module or its parents. `searched`: see search_path.
    """
    parent, _, _ = module.rpartition(".")
    path: list[str] | None = None
    if parent:
        path = search_path(parent, searched)
        if not path:
            return None
    for finder in sys.meta_path:
        if is_ours(finder):
            continue
        try:
            if any(finder is own for own in PYTHONS_OWN):
                look = getattr(finder, "find_spec", None)
                spec = None if look is None else look(module, path)
            else:
                spec = _editable(finder, module)
        except ImportError:  # the finder forbids the module; an import would fail in the same way
            return None
        except KeyError:
            # PathFinder looks in sys.modules for the parent of a namespace package. The parent is not imported here.
            if path is None:
                raise
            spec = _nested_namespace(module, path)
        if spec is not None:
            return spec
    return None


def file_of(loaded: object) -> str | None:
    """The source of a loaded module. None if it has no file."""
    # Read from the dictionary: reading an attribute of a lazy module would import something.
    try:
        namespace = object.__getattribute__(loaded, "__dict__")
    except AttributeError:
        return None
    return source_of(namespace.get("__file__") or _origin(namespace.get("__spec__")))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _content(path: str) -> bytes:
    found = read_beginning(path, MAX_SOURCE_BYTES + 1)
    if len(found) > MAX_SOURCE_BYTES:
        raise SourceError(f"{path} is larger than {MAX_SOURCE_BYTES} bytes", "damaged")
    return found


class Sources:
    """Sources of modules. Each module is located, read and parsed at most once.

    roots: directories to search instead of sys.path. So releases can be pinned and audited without an install.
    before: earlier Sources. Their results stay valid for files that have not changed.
    known: gives the fingerprint of a name in a known file (see known_files), or None.
    """

    def __init__(
        self,
        roots: Iterable[str | os.PathLike[str]] | None = None,
        before: Sources | None = None,
        known: Known | None = None,
    ) -> None:
        self.table = known
        self._roots = None if roots is None else [Path(root) for root in roots]
        self._trees: dict[str, ast.Module | SourceError] = {}
        self._paths: dict[str, str | None] = {}
        self._stamps: dict[str, tuple[str, object] | None] = {}
        self._searched: dict[str, list[str]] = {}
        self._found: dict[object, tuple[list[object], Any]] = {} if before is None else dict(before._found)
        if before is not None and before.table is not known:  # fingerprints may be those of another table
            self._found = {key: held for key, held in self._found.items() if key[0] == "digest"}  # type: ignore[index]

    def remembered(self, key: object, modules: Iterable[str], find: Callable[[], T]) -> T:
        """The result or SourceError of `find`. `find` is called again only when a file of `modules` has changed."""
        stamps = [self._stamp(module) for module in modules]
        held = self._found.get(key)
        if held is None or held[0] != stamps:
            found: Any
            try:
                found = find()
            except SourceError as error:
                found = SourceError(str(error), error.cause)
            held = self._found[key] = stamps, found
        if isinstance(held[1], SourceError):
            # A new error each time: a traceback would keep the frames alive, and the trees in them.
            raise SourceError(str(held[1]), held[1].cause)
        return held[1]

    def _stamp(self, module: str) -> object:
        """A value that differs once the file of `module` has changed, or while the file is too new to tell."""
        if module not in self._stamps:
            path = self.path(module)
            self._stamps[module] = None if path is None else (path, stamp_of(path))
        return self._stamps[module]

    def known(self, module: str, qualname: str, added: bool) -> str | None:
        """The fingerprint of a name in a known file, which need not be parsed. None if the file is not known."""
        if self.table is None:
            return None
        digest = self.digest(module)
        return None if digest is None else self.table(digest, module, qualname, added)

    def digest(self, module: str) -> str | None:
        """32 hexadecimal digits over the file of `module`. None if it is no source, or cannot be read."""
        return self.remembered(("digest", module), [module], lambda: self._digest(module))

    def _digest(self, module: str) -> str | None:
        path = self.path(module)
        try:
            return _hash(self._bytes(path)) if path is not None and path.endswith(".py") else None
        except SourceError:
            return None

    def forget_trees(self) -> None:
        """Free the syntax trees, which take a hundred times the memory of the kept results."""
        self._trees.clear()

    def path(self, module: str) -> str | None:
        """The file of `module`. None if it has none (not installed, a namespace, built in)."""
        if module not in self._paths:
            self._paths[module] = self._locate(module)
        return self._paths[module]

    def namespace(self, package: str) -> list[str]:
        """The directories of `package` if it is a namespace. Empty if it has a file."""
        if self.path(package) is not None:
            return []
        if self._roots is not None:
            return [str(found) for root in self._roots if os.path.isdir(found := root.joinpath(*package.split(".")))]
        return search_path(package)

    def _locate(self, module: str) -> str | None:
        if self._roots is not None:
            relative = Path(*module.split("."))
            for root in self._roots:
                for candidate in (root / relative.with_suffix(".py"), root / relative / "__init__.py"):
                    if os.path.isfile(candidate):  # Path.is_file would raise for a forbidden place or a name too long
                        return str(candidate)
            return None
        loaded = sys.modules.get(module)
        if loaded is not None:
            return file_of(loaded)
        try:
            return source_of(_origin(find_spec(module, searched=self._searched)))
        except UNCOMPILED as error:  # zipimport compiles a module in order to locate it
            raise SourceError(f"{module} cannot be located: {error}", "damaged") from None

    def tree(self, module: str) -> ast.Module:
        """The syntax tree of `module`. SourceError says why there is none."""
        if module not in self._trees:
            try:
                if self.path(module) is None:
                    self.text(module)  # says that there is none
                self._trees[module] = self._parse(module)
            except SourceError as error:
                self._trees[module] = error
        found = self._trees[module]
        if isinstance(found, SourceError):
            raise found
        return found

    def _parse(self, module: str) -> ast.Module:
        try:
            return parse(self.text(module))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise SourceError(f"{self.path(module)} cannot be parsed: {error}", "damaged") from None

    def text(self, module: str) -> str:
        """The source of `module`. SourceError says why there is none."""
        path = self.path(module)
        self._stamp(module)  # before the file is read
        if path is None:
            raise SourceError(f"there is no module {module}", "missing")
        if not path.endswith(".py"):
            raise SourceError(f"{path} is not Python source, so the body of {module} cannot be known", "bytecode")
        try:
            content = self._bytes(path)
            self.digest(module)
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            if encoding not in ENCODINGS:
                raise SourceError(f"{path} is encoded in {encoding[:40]!r}, which is not read", "damaged")
            return decode_source(content)
        except (SyntaxError, ValueError) as error:
            raise SourceError(f"{path} cannot be decoded: {error}", "damaged") from None

    def _bytes(self, path: str) -> bytes:
        return _content(path)
