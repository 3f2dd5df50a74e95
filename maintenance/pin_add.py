"""`shim pin --add`: one release or commit more in the matrix, with its pins, its tables, and what is left to decide."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from shim._archives.trees import Tree, open_tree
from shim._errors import MatrixError, NotMetError, OptionError
from shim._matrix import load
from shim._matrix.declared import RIGHT, Commit
from shim._matrix.load import lock_path
from shim._matrix.model import DISTRIBUTIONS, Matrix, Pin
from shim._planning.evidence import evidence_for, evidence_in
from shim._releases import known_files
from shim._releases.known_files import measure_files
from shim._releases.sources import Sources
from shim._releases.versions import parse_version
from shim._tools.audit import Audit, Finding, audit
from shim._tools.audit_report import as_text
from shim._tools.support import stale
from shim.testing.releases import FetchError, fetch_commit
from shim.testing.repositories import REPOSITORIES, GitError, described, local_repository, obtain

from .docs import everything
from .matrix_text import top_bound, with_commit, with_new_range, with_release, with_wider_ranges
from .pin import Evidence, measure_one, replace_file
from .pin_all import tables_of_names
from .tables import render_files, render_pins

__all__ = ["Added", "New", "add", "parse_new", "seconds", "tree_of"]

NEW = re.compile(r"(?:([A-Za-z0-9._-]+)==)?([A-Za-z0-9.+!_-]+)")
HASH = re.compile(r"[0-9a-f]{10,40}")
NAME_LENGTH = 10
DOWNLOAD, PAIR, REST = 4.0, 0.8, 12.0  # seconds of one download, of one pair of releases, and of all else

NEXT = """\
Then, in this order (docs/new-release.md):
  make pins docs-all after each change of the matrix
  python -m shim.testing.cells --releases {cell} -- -q -p no:warnings {tests}
  make test
  a fragment in changes/"""
# Of a commit with patches that have no pin.
PROVE = """\
Let their proofs decide:
  shim pin --prove --against TREE --lock FILE
  python -m shim.maintenance.known_trees {name} FILE"""

Lock = Mapping[str, Any]
Fetch = Callable[[str, str], Path]
Say = Callable[[str], None]


@dataclass(frozen=True)
class New:
    """What is to be added: a release, or the digits of a commit."""

    distribution: str
    name: str
    is_commit: bool


@dataclass(frozen=True)
class Added:
    """What was added, and what a person has to do now. `name` is that of the release or commit.

    newest: the newest megatron-core, for a cell with a TE release.
    audited: the audit against the pins as they were.    files: what was written.
    widened: patch id -> the bound of its range before and after.    ranges: patch id -> what a new range gives.
    decide: what has no answer yet, a line each.
    read: changed bodies on which the patch was proved: patch id -> targets.
    """

    new: New
    name: str
    newest: str
    audited: Audit
    files: tuple[Path, ...]
    widened: Mapping[str, tuple[str, str]]
    ranges: Mapping[str, str]
    decide: tuple[str, ...]
    read: Mapping[str, tuple[str, ...]]

    def to_dict(self) -> dict[str, Any]:
        return {
            "added": self.name,
            "audit": self.audited.to_dict(),
            "files": list(map(str, self.files)),
            "widened": {id: {"from": f"<{old}", "to": f"<{new}"} for id, (old, new) in self.widened.items()},
            "ranges": dict(self.ranges),
            "decide": list(self.decide),
            "read": {id: list(targets) for id, targets in self.read.items()},
        }

    def __str__(self) -> str:
        """The audit with its diffs, what was written, and what is left to a person, in the order of the work."""
        lines = [as_text(self.audited), "", *(f"wrote {file}" for file in self.files), ""]
        wider = [f"  {id}: <{old} became <{new}" for id, (old, new) in self.widened.items()]
        lines += ["Ranges that reach to it now:", *wider, ""] if wider else []
        lines += ["New ranges:", *(f"  {id}: {gives}" for id, gives in self.ranges.items()), ""] if self.ranges else []
        lines += ["To read, in the audit above: changed bodies with which the patch holds by its proofs"]
        lines += [f"  {id}: {', '.join(targets)}" for id, targets in self.read.items()] or ["  none"]
        until = (
            "it is not known there whether the patch is needed"
            if self.new.is_commit
            else "`shim matrix` and the tests complain"
        )
        lines += ["", f"To decide; until then {until}:"]
        lines += [f"  {line}" for line in self.decide] or ["  nothing"]
        lines += ["", PROVE.format(name=self.name)] if self.new.is_commit and self.decide else []
        core = self.new.distribution == "megatron-core"
        cell = self.name if core else f"{self.newest}+{self.name}"
        return "\n".join([*lines, "", NEXT.format(cell=cell, tests="tests/cells" if core else "tests/pairs")])


def parse_new(text: str) -> New:
    """``0.20.0``, ``transformer-engine==2.21.0``, or a commit, 10 to 40 digits, with or without a distribution."""
    found = NEW.fullmatch(text)
    distribution = (found[1] if found else None) or "megatron-core"
    if found is None or distribution not in DISTRIBUTIONS:
        names = " or ".join(f"{name}==X" for name in DISTRIBUTIONS)
        raise OptionError(f"{text!r} is not a release that can be added; write 0.20.0, {names}, or a commit")
    if HASH.fullmatch(found[2]):
        return New(distribution, found[2], True)
    version = parse_version(found[2])
    if version is None or version.local is not None:
        raise OptionError(f"{found[2]!r} is neither a version nor the digits of a commit (at least {NAME_LENGTH})")
    return New(distribution, found[2], False)


def seconds(matrix: Matrix, new: New, at_hand: Callable[[str, str], bool], tables: bool) -> float:
    """About how long `add` takes: downloads, pairs with the other distribution, and the rest."""
    if not tables or new.is_commit:
        return REST
    other = next(name for name in DISTRIBUTIONS if name != new.distribution)
    releases = matrix.supported.get(other, ())
    missing = sum(not at_hand(other, release) for release in releases)
    return REST + DOWNLOAD * (missing + 1) + PAIR * len(releases)


def add(
    matrix: Matrix,
    new: New,
    fetch: Fetch,
    say: Say,
    *,
    source: Path | None = None,
    of: str = "main",
    top: Path | None = None,
    proved: Lock | None = None,
    ranges: bool = False,
    documents: bool = True,
) -> Added:
    """Add `new` to the file of `matrix`, and write all that follows from it. Nothing is written if it raises.

    source: a directory with the sources of a release, or a git directory that has the commit.
    of: what a commit is of, as in the matrix.
    proved: a lock of `shim pin --prove` on the sources of a release. Its verdicts count for the bodies that they name.
    ranges: write new ranges as well, if bodies or proofs give a release something else than its version.
    top: the source tree of shim, if the matrix is the one that ships: its tables and documents are written too.
    """
    if new.is_commit:
        commit, root, tree = _commit(matrix, new, source, of, say)
        name = commit.name
    else:
        if new.name in matrix.names(new.distribution):
            raise OptionError(f"{new.distribution} {new.name} is supported already")
        commit, name = None, new.name
        root = source if source is not None else fetch(new.distribution, name)
        tree = tree_of(new, root)
    say(f"audits {new.distribution} {name}")
    found = audit(matrix, tree, fetch, proved=evidence_for(proved, tree.environment))
    findings = {f.id: f for f in found.findings if f.distribution == new.distribution}
    path = Path(matrix.path)
    text = path.read_text("utf-8")
    if commit is None:
        text = with_release(text, new.distribution, name)
        text, widened, new_ranges, decide = _with_rules(text, matrix, new, findings, ranges)
    else:
        text, widened, new_ranges = with_commit(text, new.distribution, commit), {}, {}
        decide = _unpinned(matrix, new.distribution, commit, findings)
    after = _read(path, text, matrix.shipped)
    say(f"measures {new.distribution} {name}")
    pins = _pins(matrix, after, new.distribution, name, Sources([root]), decide, evidence_in(proved or {}))
    undecided = [id for id, _ in decide]
    decide += _repin_commits(matrix, after, new.distribution, name, fetch, pins)
    written = {path: text, lock_path(path): render_pins(pins)}
    if top is not None:
        known = known_files.known_files()
        files = {module: {d: dict(b) for d, b in digests.items()} for module, digests in known.items()}
        bodies = sorted({body for entry in after.patches.values() for body in entry.bodies})
        measure_files(Sources([root]), bodies, files)
        written[known_files.FILE] = render_files(files)
        if commit is None:

            def fetched(distribution: str, release: str) -> Path:
                return root if (distribution, release) == (new.distribution, name) else fetch(distribution, release)

            written |= tables_of_names(after, fetched, say, anew=False)
    files_written = _write(written, say, top if documents else None)
    told = {id for id, _ in decide}
    left = [
        line for line in stale(load.load_matrix(path, check_ranges=False)) if not any(f" {id}," in line for id in told)
    ]
    return Added(
        new,
        name,
        after.supported.get("megatron-core", ("",))[-1],
        found,
        tuple(files_written),
        widened,
        new_ranges,
        (*(line for _, line in decide), *left),
        {id: kept for id, f in findings.items() if (kept := _kept(f)) and id not in undecided},
    )


def tree_of(new: New, root: Path) -> Tree:
    """The tree at `root`. OptionError if it is another release."""
    tree = open_tree(str(root), _nothing)
    installed = tree.environment.installed.get(new.distribution)
    if installed is None:
        raise OptionError(f"{root} has no {new.distribution}")
    if installed.version is None or installed.version.base_version != Version(new.name).base_version:
        raise OptionError(f"{root} says that it is {new.distribution} {installed.raw}, and not {new.name}")
    named = {**tree.environment.installed, new.distribution: replace(installed, raw=new.name)}
    return replace(tree, name=f"{new.distribution} {new.name}", environment=replace(tree.environment, installed=named))


def _nothing(distribution: str, release: str) -> Path:
    raise OptionError(f"name a directory with {distribution} {release}")


def _commit(matrix: Matrix, new: New, source: Path | None, of: str, say: Say) -> tuple[Commit, Path, Tree]:
    """The commit as the matrix will have it, the directory with its sources, and these as a tree."""
    distribution = new.distribution
    variable = REPOSITORIES[distribution].variable
    with tempfile.TemporaryDirectory() as scratch:
        try:
            if len(new.name) < 40 and local_repository(distribution, new.name, source) is None:
                raise OptionError(f"no clone has {new.name}; write all forty digits, or name a clone in {variable}")
            repository = obtain(
                distribution, new.name, Path(scratch), lambda: say(f"fetches {distribution} {new.name}"), source
            )
            hash, day = described(repository, new.name)
            name = hash[:NAME_LENGTH]
            if name in matrix.names(distribution):
                raise OptionError(f"{distribution} {matrix.shown(distribution, name)} is in the matrix already")
            # The version is in the sources, which are kept by the name alone.
            root = fetch_commit(Commit(name, hash, "0", day, of), distribution, None, repository)
        except (GitError, FetchError) as error:
            raise NotMetError(f"{distribution} {new.name} could not be fetched: {error}") from None
    tree = open_tree(str(root), _nothing)
    installed = tree.environment.installed.get(distribution)
    version = None if installed is None else installed.version
    if installed is None or version is None:
        raise OptionError(f"the sources of {distribution} commit {name} at {root} do not say their version")
    commit = Commit(name, hash, version.public, day, of)
    if not (version.is_prerelease or commit.tagged):
        commit = replace(commit, version=f"{version.base_version}.dev0")
    named = {**tree.environment.installed, distribution: replace(installed, raw=commit.version)}
    environment = replace(tree.environment, installed=named)
    return commit, root, replace(tree, name=f"{distribution} {commit}", environment=environment)


def _kept(finding: Finding) -> tuple[str, ...]:
    """The targets whose unknown bodies run in proofs that are right."""
    return tuple(d.target for d in finding.differences) if finding.verdict == "apply" else ()


def _given(finding: Finding) -> str | None:
    """The variant that the bodies ask for, or one of RIGHT. None if they ask for none that is known to hold."""
    return finding.verdict if finding.verdict in RIGHT else finding.variant if finding.verdict == "apply" else None


Decide = list[tuple[str, str]]  # patch id, and what is to be decided


def _with_rules(
    text: str, matrix: Matrix, new: New, findings: Mapping[str, Finding], ranges: bool
) -> tuple[str, dict[str, tuple[str, str]], dict[str, str], Decide]:
    """The text with ranges that reach to the release, if its bodies leave nothing to decide."""
    version = Version(new.name)
    next_minor = ".".join(map(str, (version.major, version.minor + 1)))
    widened: dict[str, tuple[str, str]] = {}
    written: dict[str, str] = {}
    decide: Decide = []
    for id, finding in findings.items():
        rule, given = matrix.patches[id].pinned_rule(version), _given(finding)
        says = None if rule is None else rule.gives
        if given is None:
            decide.append((id, f"{id} ({finding.words}): {_remedy(finding, new, says)}"))
        elif says == given:
            continue
        elif says is None and (top := top_bound(text, id, new.distribution, new.name)) and given in top[1]:
            text = with_wider_ranges(text, id, new.distribution, given, top[0], next_minor)
            widened[id] = top[0], next_minor
        elif ranges and (changed := _with_range(text, matrix, new, finding, given)):
            text, written[id] = changed, given
        elif says is None:
            where = given if given in RIGHT else f"the variant {given}"
            decide.append((id, f"{id}: {finding.reason}. Give {where} a range that has {new.name}"))
        else:
            decide.append(
                (id, f"{id}: the ranges say {says}, its bodies say {given} ({finding.reason}); correct the ranges")
            )
    return text, widened, written, decide


def _with_range(text: str, matrix: Matrix, new: New, finding: Finding, given: str) -> str | None:
    """The text in which a patch gets a range from the release on. None if a person has to write it."""
    version = Version(new.name)
    minor, end = f"{version.major}.{version.minor}", f"{version.major}.{version.minor + 1}"
    there = [Version(release) for release in matrix.supported.get(new.distribution, ())]
    begin = new.name if any(v.release[:2] == version.release[:2] for v in there) else minor
    note = "its proofs are right there" if "proved on" in finding.reason else finding.reason.partition(": ")[2]
    return with_new_range(text, finding.id, new.distribution, given, begin, end, note)


def _remedy(finding: Finding, new: New, says: str | None) -> str:
    """What a person can do about a patch that does not fit."""
    if finding.verdict == "gone":
        first = "look for where upstream moved the code"
    else:
        first = "let its proofs decide (shim pin --prove --against TREE --lock FILE), or read the bodies above"
    beside = f"if the change is beside the point, say so under `decided`, as {says}" if says else "then widen a range"
    rule = f"end the range of {says} before {new.name}, and " if says else ""
    right = "if the release is right by itself, give it a range under `upstream` or `not_needed`"
    return f"{first}; {beside}; {right}; else {rule}write a variant for {new.name}"


def _unpinned(matrix: Matrix, distribution: str, commit: Commit, findings: Mapping[str, Finding]) -> Decide:
    """The patches for which no body speaks on the commit: its proofs can."""
    version = Version(commit.version)
    return [
        (id, f"{id} ({finding.words}): it has no pin there until its proofs have run, or a variant fits")
        for id, finding in findings.items()
        if _given(finding) is None and (finding.verdict != "out-of-range" or matrix.patches[id].pinned_rule(version))
    ]


def _read(path: Path, text: str, shipped: bool) -> Matrix:
    """The rules of the new text. MatrixError if they cannot be read, which is an error of this module."""
    found = load.read_content(path, text.encode())
    return found if shipped else replace(found, content="added")


def _pins(
    before: Matrix,
    after: Matrix,
    distribution: str,
    name: str,
    sources: Sources,
    decide: Decide,
    proved: Evidence,
) -> dict[str, dict[str, dict[str, Pin]]]:
    """All pins: those there were, and those of the new release for every patch that is decided.

    A patch for which the ranges alone speak joins `decide`.
    """
    known = before.pins.get(distribution, {})
    undecided = {id for id, _ in decide}
    new: dict[str, Pin] = {}
    for id, entry in after.patches.items():
        if entry.distribution != distribution or id in undecided:
            continue
        try:
            pin = measure_one(after, entry, name, sources, known, known, proved.get(id, ()))
        except MatrixError as error:
            decide.append((id, str(error)))
            continue
        if pin is not None:
            new[id] = pin
    old = before.pins
    return {
        d: {n: new if (d, n) == (distribution, name) else dict(old.get(d, {}).get(n, {})) for n in after.names(d)}
        for d in {**after.supported, **after.commits}
    }


def _repin_commits(
    before: Matrix, after: Matrix, distribution: str, new: str, fetch: Fetch, pins: dict[str, dict[str, dict[str, Pin]]]
) -> Decide:
    """Pin the commits again for whose versions the ranges have changed, in `pins`. Returns what stands in the way."""
    decide: Decide = []
    for name in after.commits.get(distribution, {}):
        changed = [
            id
            for id, entry in after.patches.items()
            if entry.distribution == distribution and name != new and _rule(before, id, name) != _rule(after, id, name)
        ]
        try:
            sources = Sources([fetch(distribution, name)]) if changed else None
        except NotMetError:
            sources = None
        for id in changed:
            try:
                if sources is None:
                    raise MatrixError(f"{id}: {distribution} {after.shown(distribution, name)} is not at hand")
                pin = measure_one(after, after.patches[id], name, sources, pins[distribution])
                pins[distribution][name].pop(id, None)
                if pin is not None:
                    pins[distribution][name][id] = pin
            except MatrixError as error:
                decide.append((id, str(error)))
    return decide


def _rule(matrix: Matrix, id: str, name: str) -> str | None:
    """What the ranges of a patch give to the version of a release or commit."""
    entry = matrix.patches[id]
    rule = entry.pinned_rule(matrix.version(entry.distribution, name))
    return None if rule is None else rule.gives


def _write(written: Mapping[Path, str], say: Say, top: Path | None) -> list[Path]:
    """Write the files, and what is generated from them. Where that fails, all of them are as they were."""
    before: dict[Path, bytes | None] = {}

    def put(files: Mapping[Path, str]) -> None:
        for file, text in files.items():
            was = file.read_bytes() if file.is_file() else None
            if was != text.encode():
                before.setdefault(file, was)
                replace_file(file, text.encode())

    try:
        put(written)
        if top is not None:
            say("writes the documents")
            put(everything(top))
    except BaseException:
        for file, was in before.items():
            if was is None:
                file.unlink(missing_ok=True)
            else:
                replace_file(file, was)
        raise
    return list(before)
