"""The sets of bodies that each patch has on the commits of a repository, read by git without a work tree.

A blob is read once: what it has of the names that patches bind or read stays in a cache beside the releases. So a walk
over two thousand commits takes a minute of CPU the first time, and seconds later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shim._archives.git_commits import Git
from shim._archives.packed import PackedSources
from shim._errors import OptionError, SourceError
from shim._matrix.model import Matrix, PatchEntry, Variant
from shim._planning.bodies import Bodies
from shim._planning.evidence import digest_of_bodies
from shim._releases.detect import DISTRIBUTIONS, Environment, Installed
from shim._releases.fingerprint import ABSENT, split_target
from shim._releases.known_files import MISSING, measure_files
from shim._releases.sources import Sources

__all__ = ["BRANCHES", "Commit", "Found", "Walk", "commits_of", "heads_of", "names_of"]

# Of each distribution the branches, the first commit that is no longer of interest, and the directory of its package.
BRANCHES = {
    "megatron-core": (r"main|dev|core_r0\.1[2-9]\S*|core_r0\.[2-9][0-9]\S*|core_dev_r\S+", "core_v0.12.0"),
    "transformer-engine": (r"main|release_v2\.\S+", "v2.0"),
}
PULL = re.compile(r"\(#(\d+)\)")
T = TypeVar("T")
BATCH = 200  # blobs at once


@dataclass(frozen=True)
class Commit:
    """A commit: its hash, its day, and the number of its pull request, "" if its subject has none."""

    hash: str
    date: str
    number: str = ""

    @property
    def short(self) -> str:
        return self.hash[:10]


def heads_of(git: Git, distribution: str) -> dict[str, str]:
    """The branches of the repository that count, each with its commit."""
    pattern, _ = BRANCHES[distribution]
    said = git.text("for-each-ref", "--format=%(refname) %(objectname)", "refs/heads", "refs/remotes/origin") or ""
    found: dict[str, str] = {}
    for line in said.splitlines():
        ref, _, commit = line.partition(" ")
        name = re.sub(r"^refs/(heads|remotes/origin)/", "", ref)
        if re.fullmatch(pattern, name):
            found.setdefault(name, commit)
    if not found:
        raise OptionError(f"the repository has none of the branches {pattern}. Remedy: fetch them")
    return found


def commits_of(git: Git, distribution: str, heads: Iterable[str], without: Iterable[str] = ()) -> list[Commit]:
    """The commits below `heads` that change the package, oldest first. without: commits whose history is left out."""
    _, since = BRANCHES[distribution]
    directory = DISTRIBUTIONS[distribution].package.replace(".", "/")
    known = [commit for commit in (since, *without) if git.text("rev-parse", "--verify", "--quiet", f"{commit}^{{}}")]
    said = git.text(
        "log",
        "--format=%H %cd %s",
        "--date=format-local:%Y-%m-%d",
        "--date-order",
        "--reverse",
        *heads,
        *(f"^{commit}" for commit in known),
        "--",
        directory,
    )
    if said is None:
        raise OptionError(f"git cannot list the commits: {git.complaint}. Remedy: fetch the whole history")
    found = []
    for line in said.splitlines():
        hash, date, subject = (*line.split(" ", 2), "")[:3]
        pulls = PULL.findall(subject)
        found.append(Commit(hash, date, f"#{pulls[-1]}" if pulls else ""))
    return found


def names_of(entries: Iterable[PatchEntry]) -> dict[str, list[str]]:
    """The names that these patches bind or read, or that a class inherits for them, by module."""
    found: dict[str, list[str]] = {}
    for module, qualname in sorted(map(split_target, set().union(*map(_all, entries)))):
        found.setdefault(module, []).append(qualname)
    return found


@dataclass(frozen=True)
class Found:
    """The bodies that one patch has on a commit: all of them, "" for one that is missing; and their digest."""

    entry: PatchEntry
    bodies: Bodies
    digest: str

    @property
    def has_targets(self) -> bool:
        return not all(map(self.bodies.missing, self.entry.targets))

    @property
    def is_released(self) -> bool:
        """Whether a release has these bodies: those of a variant, or as one that is right. Then no proof runs."""
        bodies, entry = self.bodies, self.entry
        if any(bodies.all_known(variant.name, bodies.of(variant)) for variant in entry.variants.values()):
            return True
        return any(True for _ in bodies.matrix.right_like(entry.id, bodies.found, bodies.missing))

    def digest_of(self, variant: Variant | None) -> str:
        """What evidence about the variant names; None: about stock."""
        return self.bodies.digest(variant)


class _Measured(Sources):
    """Sources of which only fingerprints are known, by module and name."""

    def __init__(self, table: Mapping[str, Mapping[str, str]]) -> None:
        super().__init__([])
        self._table = table

    def remembered(self, key: Any, modules: Iterable[str], find: Callable[[], T]) -> T:
        """The fingerprint, as shim._releases.fingerprint.fingerprint finds it in a file."""
        target, inherits, may_be_missing = key
        if inherits is not None and self._value(target) != ABSENT:
            raise SourceError(f"{target} is no longer inherited", "changed")
        found: Any = self._value(inherits or target)
        if found == MISSING or (found == ABSENT and not may_be_missing):
            raise SourceError(f"there is no {target}", "missing")
        return found

    def _value(self, target: str) -> str:
        module, qualname = split_target(target)
        return self._table.get(module, {}).get(qualname, MISSING)


class Walk:
    """The bodies of all patches of a distribution on any commit of a repository.

    cache: a file with what blobs have, a line for each. It may be missing.
    """

    def __init__(self, git: Git, distribution: str, matrix: Matrix, cache: Path) -> None:
        self._git = git
        self._matrix = matrix.released
        self._entries = [e for e in matrix.patches.values() if e.distribution == distribution and e.stands_alone]
        self._distribution = distribution
        self._names = names_of(self._entries)
        package = DISTRIBUTIONS[distribution].package.split(".")[0]
        self._names = {module: names for module, names in self._names.items() if module.split(".")[0] == package}
        self._places = {
            path: module
            for module in self._names
            for path in (f"{module.replace('.', '/')}.py", f"{module.replace('.', '/')}/__init__.py")
        }
        self._of_patch = {entry.id: sorted({split_target(name)[0] for name in _all(entry)}) for entry in self._entries}
        self._cache = cache
        self._known: dict[str, dict[str, str]] = {}  # blob and module -> name -> value, "digest" for the whole file
        self._found: dict[tuple[str, tuple[str, ...]], Found] = {}
        if cache.is_file():
            for line in cache.read_text("utf-8").splitlines():
                key, values = json.loads(line)
                self._known.setdefault(key, {}).update(values)

    def blobs(self, commit: str) -> dict[str, str]:
        """The file of each module in the commit, as git names it."""
        said = self._git.text("ls-tree", "-r", "--full-tree", commit, "--", *self._places)
        if said is None:
            raise OptionError(f"the commit {commit} cannot be read: {self._git.complaint}. Remedy: fetch all of it")
        found = {}
        for line in said.splitlines():
            described, _, path = line.partition("\t")
            mode, _, blob = described.split(" ")
            if mode.startswith("100"):
                found[self._places[path]] = blob
        return found

    def measure(self, blobs: Iterable[tuple[str, str]]) -> None:
        """Read these blobs, each with its module, unless the cache has them."""
        missing = [
            (blob, module)
            for blob, module in dict.fromkeys(blobs)
            if not set(self._names[module]) <= self._known.get(f"{blob} {module}", {}).keys()
        ]
        for at in range(0, len(missing), BATCH):
            part = missing[at : at + BATCH]
            contents = self._git.blobs([blob for blob, _ in part])
            lines = []
            for (blob, module), content in zip(part, contents, strict=True):
                values = self._values(module, content)
                self._known.setdefault(f"{blob} {module}", {}).update(values)
                lines.append(json.dumps([f"{blob} {module}", values]) + "\n")
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            with self._cache.open("a", encoding="utf-8") as file:
                file.writelines(lines)

    def _values(self, module: str, content: bytes) -> dict[str, str]:
        path = f"{module.replace('.', '/')}.py"
        found: dict[str, dict[str, dict[str, str]]] = {}
        measure_files(PackedSources(module, {path: content}), [f"{module}:{n}" for n in self._names[module]], found)
        [(digest, values)] = found[module].items()
        return {**values, "digest": digest}

    def files(self, blobs: Iterable[tuple[str, str]]) -> dict[str, dict[str, dict[str, str]]]:
        """The bodies in these blobs, each with its module, by the digest that a plan takes of a file."""
        found: dict[str, dict[str, dict[str, str]]] = {}
        for blob, module in dict.fromkeys(blobs):
            values = self._known[f"{blob} {module}"]
            bodies = {name: values[name] for name in self._names[module]}
            found.setdefault(module, {})[values["digest"]] = bodies
        return found

    def on(self, blobs: Mapping[str, str]) -> Iterator[Found]:
        """The bodies of each patch, if the modules are these blobs."""
        for entry in self._entries:
            modules = self._of_patch[entry.id]
            key = entry.id, tuple(blobs.get(module, "") for module in modules)
            if key not in self._found:
                self._found[key] = self._measured(entry, modules, blobs)
            yield self._found[key]

    def _measured(self, entry: PatchEntry, modules: Sequence[str], blobs: Mapping[str, str]) -> Found:
        table = {m: self._known[f"{blobs[m]} {m}"] for m in modules if m in blobs}
        sources = _Measured(table)
        name = self._distribution
        installed = {name: Installed(name, DISTRIBUTIONS[name].package, "", None, "unknown")}
        bodies = Bodies(entry, Environment(installed, sources), self._matrix)
        every: dict[str, Any] = {variant.name: bodies.of(variant) for variant in entry.variants.values()}
        return Found(entry, bodies, digest_of_bodies({**bodies.here(), "": json.dumps(every, sort_keys=True)}))


def _all(entry: PatchEntry) -> set[str]:
    """The names that a patch binds or reads, or that a class inherits for it."""
    return {
        name for variant in entry.variants.values() for name in (*variant.bodies, *(variant.inherited or {}).values())
    }
