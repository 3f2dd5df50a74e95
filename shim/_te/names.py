"""The names of Transformer Engine that megatron-core imports, and those among them that a TE release lacks.

megatron-core guards its imports of Transformer Engine. So a missing name raises nothing: a feature is silently off.
`shim pin --releases` writes the names into wanted_names.json, from the wheels of both.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from shim._errors import SourceError
from shim._releases.fingerprint import absolute_origin, blocks, names_bound_by, split_target
from shim._releases.sources import Sources

__all__ = [
    "TE_PACKAGE",
    "FILE",
    "LostName",
    "Names",
    "as_target",
    "dotted",
    "imported_below",
    "lost_names",
    "wanted_names",
]

FILE = Path(__file__).with_name("wanted_names.json")
TE_PACKAGE = "transformer_engine"
CHAIN_LIMIT = 100  # modules that pass a name on to each other. In real releases they are fewer than five.


@dataclass(frozen=True)
class LostName:
    """A name that a TE release lacks, the megatron-core that wants it, and the TE releases that have it."""

    name: str
    wanted: str  # the first and the last release of megatron-core that import it
    last_seen: str  # the newest TE release before this one that has it; "" for none
    comes_with: str  # the first TE release after this one that has it; "" for none
    newly: bool  # the TE release just before this one has it

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "wanted_by": self.wanted,
            "last_seen": self.last_seen,
            "comes_with": self.comes_with,
            "newly": self.newly,
        }

    @property
    def whereabouts(self) -> str:
        parts = [f"last seen in {self.last_seen}"] if self.last_seen else []
        parts += [f"comes with {self.comes_with}"] if self.comes_with else []
        return (", ".join(parts) or "in no supported release") + (" (newly lost)" if self.newly else "")

    def __str__(self) -> str:
        return f"{self.name}, wanted by megatron-core {self.wanted}, {self.whereabouts}"


@lru_cache(maxsize=1)
def wanted_names() -> Mapping[str, Mapping[str, list[str]]]:
    return json.loads(FILE.read_text("utf-8"))


def lost_names(
    sources: Sources, version: Version | None, supported: Iterable[str], wanted_by: str | None = None
) -> tuple[LostName, ...]:
    """The names that the TE release in `sources` lacks: first the newly lost ones, then those that others have.

    `version` is the version of that release. None, for an unknown version, counts as newer than all `supported`.
    `wanted_by` leaves only what this release of megatron-core imports, if its imports were measured.
    """
    names = Names(sources)
    releases = sorted(supported, key=Version)
    before = [release for release in releases if version is None or Version(release) < version]
    lost = []
    measured = any(wanted_by in found["wanted_by"] for found in wanted_names().values())
    for name, found in wanted_names().items():
        if names.has(name) or (measured and wanted_by not in found["wanted_by"]):
            continue
        wanted, seen = found["wanted_by"], found["in"]
        span = wanted[0] if wanted[0] == wanted[-1] else f"{wanted[0]} - {wanted[-1]}"
        last = next((release for release in reversed(before) if release in seen), "")
        after = [release for release in releases if release not in before and release in seen]
        newly = bool(before) and last == before[-1]
        lost.append(LostName(name, span, last, next(iter(after), ""), newly))
    gone = {item.name for item in lost}
    lost = [item for item in lost if item.name.rpartition(".")[0] not in gone]  # a member is lost with its class
    return tuple(sorted(lost, key=lambda item: (not item.newly, not item.last_seen, item.name)))


@dataclass(frozen=True)
class _Module:
    """The names that a module or class binds at its top level, guarded or not, and its ``import *``."""

    bound: dict[str, list[ast.stmt]]
    stars: list[ast.ImportFrom]


class Names:
    """The names of Transformer Engine in `sources`. Each module is read once."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._modules: dict[str, _Module | None] = {}

    def has(self, name: str) -> bool:
        """Whether ``module:name`` or ``module:Class.name`` is there: defined, imported, a submodule, by ``import *``.

        Names that the sources do not show count as there: those of the compiled extension, members of base classes.
        """
        return self._has(name, set())

    def _has(self, name: str, seen: set[str]) -> bool:
        if name in seen:
            return False  # an earlier call looks for it already, or has not found it
        seen.add(name)
        module, qualname = split_target(name)
        first, _, member = qualname.partition(".")
        if self._sources.path(f"{module}.{first}") is not None:
            return not member or self._has(f"{module}.{first}:{member}", seen)
        found = self._module(module)
        if found is None:
            return False
        if first in found.bound:
            return not member or any(self._gives(module, node, first, member, seen) for node in found.bound[first])
        return any(self._passes(module, star, qualname, seen) for star in found.stars)

    def _module(self, module: str) -> _Module | None:
        if module not in self._modules:
            try:
                self._modules[module] = _looked_through(self._sources.tree(module))
            except SourceError:
                self._modules[module] = None
        return self._modules[module]

    def _gives(self, module: str, node: ast.stmt, name: str, member: str, seen: set[str]) -> bool:
        """Whether the object that a statement binds to `name` has the member."""
        if isinstance(node, ast.ImportFrom):
            original = next((a.name for a in node.names if (a.asname or a.name) == name), name)
            return self._passes(module, node, f"{original}.{member}", seen)
        if isinstance(node, ast.ClassDef):
            own = member.partition(".")[0] in _looked_through(node).bound
            return own or any(not (isinstance(base, ast.Name) and base.id == "object") for base in node.bases)
        return True

    def _passes(self, module: str, node: ast.ImportFrom, name: str, seen: set[str]) -> bool:
        origin = absolute_origin(self._sources, module, node)
        if len(seen) > CHAIN_LIMIT or origin is None or not origin.startswith(TE_PACKAGE + "."):
            return True  # an unknown module, the compiled extension, or another package
        return self._has(f"{origin}:{name}", seen)


def _looked_through(tree: ast.Module | ast.ClassDef) -> _Module:
    found = _Module({}, [])
    bodies: list[Sequence[ast.stmt]] = [tree.body]
    while bodies:
        for statement in bodies.pop():
            for name in names_bound_by(statement):
                found.bound.setdefault(name, []).append(statement)
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                found.stars.append(statement)
            bodies += [body for _, body in blocks(statement)]
    return found


def imported_below(package: Path, sources: Sources) -> dict[str, list[str]]:
    """The names that the modules of megatron-core below `package` import, each with these modules.

    A file that cannot be read tells nothing.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        parts = ["megatron", "core", *path.relative_to(package).with_suffix("").parts]
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        try:
            names = set(_names_imported_in(sources.tree(module))) if TE_PACKAGE in sources.text(module) else ()
        except SourceError:
            continue
        for name in sorted(names):
            found.setdefault(name, []).append(module)
    return found


def _names_imported_in(tree: ast.Module) -> Iterator[str]:
    """Names in ``from transformer_engine.x import y``, and in ``t.y`` after ``import transformer_engine.x as t``."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == TE_PACKAGE:
            yield from (f"{node.module}:{alias.name}" for alias in node.names if alias.name != "*")
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            mine = [alias for alias in node.names if alias.name.split(".")[0] == TE_PACKAGE]
            aliases |= {alias.asname or TE_PACKAGE: alias.name if alias.asname else TE_PACKAGE for alias in mine}
    for node in ast.walk(tree):
        parts = dotted(node) if isinstance(node, ast.Attribute) else []
        if parts and parts[0] in aliases:
            yield as_target([*aliases[parts[0]].split("."), *parts[1:]])


def as_target(parts: list[str]) -> str:
    """``module:name``, or ``module:Class.name``: a part with a capital letter is a class."""
    large = (i for i, part in enumerate(parts) if part.lstrip("_")[:1].isupper())
    split = next(large, len(parts) - 1)
    return f"{'.'.join(parts[:split])}:{'.'.join(parts[split : split + 2])}"


def dotted(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return [*before, node.attr] if before else []
    return []
