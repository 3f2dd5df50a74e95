"""The identity of a plan: the releases, the matrix, and the bodies and code of every patch to apply."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shim._errors import SourceError
from shim._matrix.load import PACKAGE, patches_path
from shim._matrix.model import Matrix
from shim._planning.decision import Decision
from shim._releases.detect import Environment
from shim._releases.files import read_bounded
from shim._releases.sources import MAX_SOURCE_BYTES, Sources
from shim._version import __version__

__all__ = ["Code", "digest_of", "identity_of"]

PACKAGE_FILE = "__init__.py"
SHIPPED = "shipped"  # stands for the hash of the matrix that ships
# Import statements, found in the text: parsing takes a hundred times as long, and a false match does no harm. The
# pattern finds imports from shim and from one other package, which takes the place of %s.
IMPORT = rb"^[ \t]*(?:from[ \t]+((?:\.|shim\b|%s\b)[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]+)|import[ \t]+([^\n#]+))"


def identity_of(decisions: Mapping[str, Decision], matrix: Matrix, environment: Environment) -> dict[str, Any]:
    """Plain data that is equal in two processes with the same files and arguments.

    Neither what they have imported nor what others have patched in them changes it.
    """
    code, patches = Code(), {}
    for id, decision in ((id, decision.displaced or decision) for id, decision in decisions.items()):
        if decision.wanted:
            module = matrix.patches[id].module
            patches[decision.id] = {
                "variant": decision.variant,
                "fingerprints": dict(decision.fingerprints),
                "options": _plain(decision.options),
                "module": module,
                "code": code.of(module),
            }
    installed = {name: i.raw for name, i in environment.installed.items()}
    return {
        "releases": {"megatron-shim": __version__, **installed},
        "matrix": matrix.content or SHIPPED,
        "patches": patches,
    }


def digest_of(identity: Mapping[str, Any]) -> str:
    """16 hexadecimal digits over an identity."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a file would give them back: what JSON does not know becomes text."""
    return json.loads(json.dumps(dict(options), default=str))


class Code:
    """The code of patch modules. Each file is read once."""

    def __init__(self) -> None:
        self._sources = Sources()
        self._files: dict[str, str | None] = {}
        self._contents: dict[str, bytes | None] = {}
        self._imports: dict[tuple[str, str], list[str]] = {}

    def of(self, module: str) -> str:
        """A hash over a patch module and all modules of shim and its own package that it imports, directly or not."""
        found: dict[str, bytes] = {}
        seen, waiting = {module}, [module]
        while waiting:
            name = waiting.pop()
            content = self._content(name)
            if content is None:  # no module, but a name in one
                continue
            found[name] = content
            if not _is_engine(name):
                top = module.partition(".")[0]
                more = {n for n in self._imported(name, content, top) if n not in seen}
                seen |= more
                waiting += more
        hashed = hashlib.sha256()
        for name, content in sorted(found.items()):
            hashed.update(f"{name} {len(content)}\n".encode() + content)
        return hashed.hexdigest()[:16]

    def _content(self, name: str) -> bytes | None:
        if name not in self._contents:
            file = self._file(name)
            self._contents[name] = None if file is None else _read(file)
        return self._contents[name]

    def _file(self, name: str) -> str | None:
        if name not in self._files:
            parent = name.rpartition(".")[0]
            holds = not parent or parent == "shim" or (self._file(parent) or PACKAGE_FILE).endswith(PACKAGE_FILE)
            # Below a module that is no package there is no module, but a function or a class.
            self._files[name] = _found(name, self._sources) if holds else None
        return self._files[name]

    def _imported(self, name: str, content: bytes, top: str) -> list[str]:
        if (name, top) not in self._imports:
            found = _imports(content, name, top)
            self._imports[name, top] = [n for n in found if n.partition(".")[0] in ("shim", top)]
        return self._imports[name, top]


def _is_engine(name: str) -> bool:
    # The version of shim stands for these modules, so their imports are not followed.
    return name.startswith("shim._")


def _imports(content: bytes, name: str, top: str) -> Iterator[str]:
    """Names in the import statements of module `name` that may be modules of shim or of the package `top`."""
    for origin, names, modules in re.findall(IMPORT % re.escape(top.encode()), content.replace(b"\\\n", b" "), re.M):
        listed = (item.split()[0].decode() for item in (names or modules).strip(b"()").split(b",") if item.split())
        if not origin:
            yield from listed
            continue
        start = origin.decode()
        if start.startswith("."):
            level = len(start) - len(start.lstrip("."))
            start = ".".join([*name.split(".")[:-level], *filter(None, [start.lstrip(".")])])
        yield start
        yield from (f"{start}.{item}" for item in listed)


def _read(file: str) -> bytes:
    try:
        return read_bounded(Path(file), MAX_SOURCE_BYTES, guarded=False)
    except OSError as error:
        return f"unreadable: {type(error).__name__}".encode()


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
