"""The meaning of a release without pins for every patch. It is not installed, imported or run."""

from __future__ import annotations

import ast
import difflib
import itertools
import zipfile
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from packaging.version import Version

from shim._archives.trees import Fetch, Tree, beside
from shim._errors import ShimError, SourceError
from shim._matrix.model import RIGHT, Matrix, PatchEntry
from shim._planning.bodies import Bodies
from shim._planning.evidence import Proved
from shim._planning.match import Match, match
from shim._releases.detect import DISTRIBUTIONS, Environment, Installed
from shim._releases.fingerprint import definitions, split_target
from shim._releases.sources import Sources
from shim._te.names import LostName, lost_names

__all__ = ["Audit", "Difference", "Finding", "audit"]

# Every state of a match in words, and "gone", which only an audit tells from "drifted".
VERDICTS = {
    "apply": "applies as it is",
    "upstream": "upstream has fixed it",
    "not-needed": "lacks what it fixes",
    "drifted": "drifted",
    "gone": "target gone",
    "out-of-range": "out of range",
    "not-installed": "not judged",
}
FINE = ("apply", *RIGHT, "out-of-range", "not-installed")  # the user has nothing to do
DIFF_LINES = 60
LINE_LENGTH = 120  # longer lines are broken at their commas, so that a diff shows the argument that changed
LINE_LIMIT = 400
NODE_LIMIT = 100_000  # nodes of a body in a diff. The largest real body has a tenth of that.
NOTE_LIMIT = 600
CANDIDATES = 3  # known bodies to fetch in order to find the nearest one


@dataclass(frozen=True)
class Difference:
    """An unknown body: the reason, and a diff from the nearest known body."""

    target: str
    bound: bool  # True for a target of the patch, False for a read
    why: str
    nearest: str = ""  # the release that the diff starts from
    diff: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "role": "binds" if self.bound else "relies on",
            "why": self.why,
            "nearest": self.nearest,
            "diff": list(self.diff),
        }


@dataclass(frozen=True)
class Finding:
    """The meaning of the release for one patch. `verdict` is one of VERDICTS."""

    id: str
    kind: str
    distribution: str
    verdict: str
    reason: str
    variant: str | None = None
    differences: tuple[Difference, ...] = ()

    @property
    def words(self) -> str:
        """The verdict for people."""
        return VERDICTS.get(self.verdict, self.verdict)

    @property
    def amiss(self) -> bool:
        """Whether a person has to look at it."""
        return self.verdict not in FINE

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "distribution": self.distribution,
            "verdict": self.verdict,
            "reason": self.reason,
            "variant": self.variant,
            "differences": [difference.to_dict() for difference in self.differences],
        }


@dataclass(frozen=True)
class Audit:
    """All findings about one tree. For a TE release also the names that megatron-core wants and it lacks.

    beside: the releases of other distributions that the tree was judged beside.
    """

    tree: Tree
    findings: tuple[Finding, ...]
    beside: tuple[Installed, ...] = ()
    lost: tuple[LostName, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def clean(self) -> bool:
        """Whether no patch has drifted or lost a target, and no name is newly lost (see LostName)."""
        amiss = any(finding.amiss for finding in self.findings)
        return not amiss and not any(name.newly for name in self.lost)

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.tree.name,
            "commit": self.tree.commit,
            "audited": {name: i.to_dict() for name, i in self.tree.environment.installed.items()},
            "beside": {i.distribution: i.to_dict() for i in self.beside},
            "clean": self.clean,
            "patches": {finding.id: finding.to_dict() for finding in self.findings},
            "lost_names": [name.to_dict() for name in self.lost],
            "notes": list(self.notes),
        }


def audit(
    matrix: Matrix, tree: Tree, fetch: Fetch, others: Iterable[Tree] = (), proved: Mapping[str, Proved] | None = None
) -> Audit:
    """Compare every patch with the bodies of `tree`. `fetch` gives the known releases that diffs start from.

    others: what `tree` is judged beside. A patch of theirs has a finding if its rules name the distribution of `tree`.
    proved: what proofs have shown on this tree, by patch.
    """
    installed = tree.environment.installed
    environment = beside(tree, others)
    known = _Known(matrix, fetch)
    concerned = [entry for entry in matrix.patches.values() if _ranges(entry) & installed.keys()]
    findings = tuple(_finding(entry, environment, matrix, known, (proved or {}).get(entry.id)) for entry in concerned)
    te = installed.get("transformer-engine")
    lost: tuple[LostName, ...] = ()
    if te is not None:
        core = environment.installed.get("megatron-core")
        wanting = None if core is None or core.version is None else core.version.public
        lost = lost_names(environment.sources, te.version, matrix.supported.get("transformer-engine", ()), wanting)
    added = tuple(i for name, i in environment.installed.items() if name not in installed)
    return Audit(tree, findings, added, lost, (*_notes(concerned, environment), *known.problems))


def _ranges(entry: PatchEntry) -> set[str]:
    """The distributions that the patch is of, or that its rules name."""
    return {entry.distribution, *(name for rule in entry.rules for name in rule.ranges)}


def _notes(concerned: Iterable[PatchEntry], environment: Environment) -> Iterator[str]:
    installed = environment.installed
    for i in installed.values():
        if not i.raw:
            yield f"{i.distribution}: no readable version; judged by bodies alone"
    lacking: dict[str, list[str]] = {}
    for entry in concerned:
        for name in sorted(_ranges(entry) - installed.keys()) if entry.distribution in installed else ():
            lacking.setdefault(name, []).append(entry.id)
    for name, ids in lacking.items():
        yield f"{', '.join(ids)}: also a matter of {name}; judged beside one release of it by --with {name}==X"


def _beside_unknown(entry: PatchEntry, environment: Environment) -> Environment:
    """`environment`, and a release of unknown version of every other distribution in the rules of the patch.

    A tree says nothing about the other distributions that its release will run beside.
    """
    unknown = {
        name: Installed(name, DISTRIBUTIONS[name].package, "", origin="not audited")
        for name in sorted(_ranges(entry) - {entry.distribution})
    }
    return replace(environment, installed={**unknown, **environment.installed})


def _finding(
    entry: PatchEntry, environment: Environment, matrix: Matrix, known: _Known, proved: Proved | None
) -> Finding:
    found = match(entry, _beside_unknown(entry, environment), matrix, proved)
    if entry.distribution not in environment.installed:
        reason = f"it is a patch of {entry.distribution}; name a release of that with --with {entry.distribution}==X"
        return Finding(entry.id, entry.kind, entry.distribution, found.state, reason)
    installed = environment.installed[entry.distribution]
    sources, version = environment.sources, installed.version
    if found.variant is None:
        return Finding(entry.id, entry.kind, entry.distribution, found.state, found.reason)
    variant = entry.variants[found.variant]
    reasons = dict(found.drifted)
    if not reasons and found.state == "apply":  # proofs speak for the bodies that are not known
        bodies = Bodies(entry, environment, matrix)
        reasons = bodies.unknown(variant.name, bodies.of(variant))
    differences = []
    gone = False
    for target in filter(reasons.__contains__, variant.bodies):
        body = variant.inherits(target) or target
        text = _body(sources, body)
        gone = gone or (target in variant.targets and not (_there(sources, body) and _there(sources, _owner(target))))
        nearest, diff = ("", ()) if text is None else known.nearest(entry, target, found, text, version)
        differences.append(Difference(target, target in variant.targets, reasons[target], nearest, diff))
    verdict = "gone" if gone and found.state == "drifted" else found.state
    return Finding(entry.id, entry.kind, entry.distribution, verdict, found.reason, found.variant, tuple(differences))


def _owner(target: str) -> str:
    """The class that a target is bound on, which may inherit the target. For a function: the function."""
    module, _, qualname = target.partition(":")
    return f"{module}:{qualname.rpartition('.')[0] or qualname}"


def _there(sources: Sources, target: str) -> bool:
    """False if the module or the definition is missing. In a file that cannot be read it counts as there."""
    module, qualname = split_target(target)
    if sources.path(module) is None:
        return False
    try:
        return bool(definitions(sources.tree(module), qualname))
    except (SourceError, RecursionError):
        return True


class _Known:
    """The bodies of pinned releases. Releases are fetched when a diff needs them."""

    def __init__(self, matrix: Matrix, fetch: Fetch) -> None:
        self._matrix = matrix
        self._fetch = fetch
        self._sources: dict[tuple[str, str], Sources | None] = {}
        self.problems: list[str] = []

    def nearest(
        self, entry: PatchEntry, target: str, found: Match, text: list[str], version: Version | None
    ) -> tuple[str, tuple[str, ...]]:
        """The release whose known body is most like `text`, and the diff from it. ("", ()) if there is none.

        A body that is known with another variant is compared with the bodies of the variant found only.
        """
        best: tuple[float, str, list[str]] | None = None
        value = found.fingerprints[target]
        elsewhere = any(pin.fingerprints.get(target) == value for _, pin in self._matrix.known(entry.id))
        variants = {found.variant} if elsewhere else set(entry.variants)
        for release in self._releases(entry, target, version, variants)[:CANDIDATES]:
            sources = self._open(entry.distribution, release)
            body = entry.variants[found.variant or ""].inherits(target) or target
            known = None if sources is None else _body(sources, body)
            if known is not None:
                likeness = difflib.SequenceMatcher(None, known, text, autojunk=False).ratio()
                if best is None or likeness > best[0]:
                    best = (likeness, release, known)
        if best is None:
            return "", ()
        shown = f"{entry.distribution} {self._matrix.shown(entry.distribution, best[1])}"
        lines = difflib.unified_diff(best[2], text, shown, "audited", "", "", 2, "")
        return best[1], tuple(_shortened(list(lines)))

    def _releases(
        self, entry: PatchEntry, target: str, version: Version | None, variants: Collection[str | None]
    ) -> list[str]:
        """One release for every body of `target` that is known with `variants`, the nearest to `version` first."""
        pinned = self._matrix.pins.get(entry.distribution, {})
        order = self._matrix.in_order(entry.distribution, pinned)
        versions = [self._matrix.version(entry.distribution, name) for name in order]
        place = len(order) if version is None else bisect_right(versions, version)
        ranked = sorted(enumerate(order), key=lambda item: abs(item[0] + 0.5 - place))
        commits = self._matrix.commits.get(entry.distribution, {})
        bodies: dict[str, str] = {}
        for _, name in ranked:
            pin = pinned[name].get(entry.id)
            body = "" if pin is None or pin.variant not in variants else pin.fingerprints.get(target, "")
            # Of a release and a commit with one body the release: its wheel is smaller than a repository.
            if body and (body not in bodies or (bodies[body] in commits and name not in commits)):
                bodies[body] = name
        return list(bodies.values())

    def _open(self, distribution: str, release: str) -> Sources | None:
        key = distribution, release
        if key not in self._sources:
            try:
                self._sources[key] = Sources([self._fetch(distribution, release)])
            except (OSError, RuntimeError, ShimError, zipfile.BadZipFile) as error:  # FetchError is a RuntimeError
                self._sources[key] = None
                why = " ".join(str(error).split())[:NOTE_LIMIT]
                self.problems.append(f"no diff from {distribution} {release}, which could not be fetched: {why}")
        return self._sources[key]


def _body(sources: Sources, target: str) -> list[str] | None:
    """The definitions of `target` and their guards as lines in a normal form, without comments and docstrings.

    None if there is no definition, or shim cannot show it.
    """
    module, qualname = split_target(target)
    lines: list[str] = []
    try:
        found = definitions(sources.tree(module), qualname)
        nodes = itertools.chain.from_iterable(ast.walk(definition.node) for definition in found)
        if sum(1 for _ in itertools.islice(nodes, NODE_LIMIT)) == NODE_LIMIT:
            return None
        for definition in found:
            lines += [f"# under: {_guard(*guard)}" for guard in definition.guards]
            lines += _unparsed(definition.node).splitlines()
    except (SourceError, RecursionError, ValueError):
        return None
    return [broken for line in lines for broken in _broken(line)] or None


def _guard(kind: str, content: object) -> str:
    parts = content if isinstance(content, list) else [content]
    return " ".join([kind, *(ast.unparse(part) for part in parts if isinstance(part, ast.AST))])


def _broken(line: str) -> list[str]:
    if len(line) <= LINE_LENGTH:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return line.replace(", ", f",\n{indent}").split("\n")


def _unparsed(node: ast.stmt) -> str:
    """The text of a definition without docstrings, because fingerprints also leave them out. `node` stays as it is."""
    documented: list[tuple[Any, list[ast.stmt]]] = []
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = inner.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                documented.append((inner, inner.body))
    try:
        for inner, body in documented:  # and not in a copy, which takes as long as everything else in an audit
            inner.body = body[1:] or [ast.Pass()]
        return ast.unparse(node)
    finally:
        for inner, body in documented:
            inner.body = body


def _shortened(lines: list[str]) -> Iterator[str]:
    yield from (line if len(line) <= LINE_LIMIT else line[:LINE_LIMIT] + "..." for line in lines[:DIFF_LINES])
    if len(lines) > DIFF_LINES:
        yield f"... {len(lines) - DIFF_LINES} more lines"
