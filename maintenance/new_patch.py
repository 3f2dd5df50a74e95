"""`shim new-patch`: compare a target on every supported release, and write the skeleton of a patch for it."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from packaging.version import Version

from shim._errors import NotMetError, OptionError, SourceError
from shim._matrix.load import PATCH_FILE, matrix_path
from shim._matrix.model import Matrix
from shim._matrix.reader import compose
from shim._printing.printable import did_you_mean
from shim._releases.fingerprint import definitions, fingerprint, names_bound_by, split_target
from shim._releases.sources import Sources

from . import new_patch_text as text
from .changes import FOLDER, fragments
from .new_patch_proposal import Body, Proposal

__all__ = ["place", "propose", "said", "unfilled", "write_patch"]

ID = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
PACKAGES = {"megatron": "megatron-core", "transformer_engine": "transformer-engine"}
Fetch = Callable[[str, str], Path]


def propose(id: str, targets: Sequence[str], matrix: Matrix, fetch: Fetch) -> Proposal:
    """Read the targets on every supported release. `fetch(distribution, release)` gives its sources.

    OptionError if the id or a target is not usable. NotMetError if no release has all targets.
    """
    if not ID.fullmatch(id) or keyword.iskeyword(id):
        raise OptionError(f"{id!r} is no id for a patch. Remedy: lower-case words with hyphens between: mtp-recompute")
    if id in matrix.patches:
        raise OptionError(f"there is a patch {id} already; shim explain {id} says what it does")
    distribution = _distribution(targets)
    releases = sorted(matrix.supported[distribution], key=Version)
    found = {}
    for release in releases:
        sources = Sources([fetch(distribution, release)])
        found[release] = _fingerprints(sources, targets)
    bodies = _bodies(found)
    having = [release for release in releases if found[release]]
    if not having:
        raise NotMetError(_nobody_has(targets, distribution, Sources([fetch(distribution, releases[-1])])))
    newest = Sources([fetch(distribution, having[-1])])
    return Proposal(
        id,
        distribution,
        tuple(targets),
        bodies,
        _variants(bodies),
        tuple(body.releases for body in bodies if not body.fingerprints),
        _kind(newest, targets[0]),
    )


def _distribution(targets: Sequence[str]) -> str:
    found = set()
    for target in targets:
        try:
            package = split_target(target)[0].partition(".")[0]
        except SourceError as error:
            raise OptionError(f"--target: {error}, as in megatron.core.optimizer:get_megatron_optimizer") from None
        if package not in PACKAGES:
            raise OptionError(f"--target {target} is in {package}; shim patches {' and '.join(PACKAGES.values())}")
        found.add(PACKAGES[package])
    if len(found) != 1:
        raise OptionError("all targets of a patch are of one distribution; write a patch for each")
    return found.pop()


def _fingerprints(sources: Sources, targets: Sequence[str]) -> tuple[str, ...]:
    """The fingerprint of each target. Empty if a target is missing."""
    try:
        return tuple(fingerprint(sources, target) for target in targets)
    except SourceError:
        return ()


def _bodies(found: dict[str, tuple[str, ...]]) -> tuple[Body, ...]:
    numbers = {prints: number for number, prints in enumerate(dict.fromkeys(filter(None, found.values())), 1)}
    groups = groupby(found.items(), key=lambda item: item[1])
    return tuple(Body(tuple(r for r, _ in items), prints, numbers.get(prints, 0)) for prints, items in groups)


def _variants(bodies: Sequence[Body]) -> dict[str, tuple[str, ...]]:
    """A variant for each run of neighbours with the same signatures: one wrapper can serve several bodies."""
    runs = [
        tuple(release for body in members for release in body.releases)
        for signature, group in groupby(bodies, key=lambda body: body.signature)
        if signature and (members := list(group))
    ]
    return {f"v{minor(run[0], '_')}": run for run in runs}


def minor(release: str, between: str = ".") -> str:
    """The major and the minor number, with the rest if that is not zero."""
    numbers = release.split(".")
    return between.join(numbers[:2] if set(numbers[2:]) <= {"0"} else numbers)


def ranges(proposal: Proposal, matrix: Matrix) -> dict[tuple[str, ...], str]:
    """The range of each group of neighbours: from its first release to the first release of the next group.

    The last one ends behind the newest commit, as those of the other patches do.
    """
    distribution = proposal.distribution
    ordered = sorted(matrix.supported[distribution], key=Version)
    major, last_minor = max(matrix.version(distribution, name) for name in matrix.names(distribution)).release[:2]
    found = {}
    for group in (*proposal.variants.values(), *proposal.without):
        after = ordered.index(group[-1]) + 1
        end = minor(ordered[after]) if after < len(ordered) else f"{major}.{last_minor + 1}"
        found[group] = f">={minor(group[0])},<{end}"
    return found


def _kind(sources: Sources, target: str) -> str:
    module, qualname = split_target(target)
    node = definitions(sources.tree(module), qualname)[-1].node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return "function"
    return "class" if isinstance(node, ast.ClassDef) else "value"


def _nobody_has(targets: Sequence[str], distribution: str, newest: Sources) -> str:
    """An error message: the target that no release has, and names that may have been meant."""
    for target in targets:
        module, qualname = split_target(target)
        try:
            fingerprint(newest, target)
        except SourceError as error:
            try:
                known = list(_names(newest.tree(module).body))
            except SourceError:
                known = []
            hint = did_you_mean(qualname, known) if known else ""
            return f"no supported release of {distribution} has {target}: {error}" + (f"; {hint}" if hint else "")
    return f"no supported release of {distribution} has all of {', '.join(targets)}"


def _names(body: Sequence[ast.stmt], prefix: str = "") -> list[str]:
    """Functions and classes at the top of a module, and the methods of the classes."""
    names = []
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names += [prefix + name for name in names_bound_by(node)]
            names += _names(node.body, f"{prefix}{node.name}.") if isinstance(node, ast.ClassDef) else []
    return names


# Writing


def write_patch(proposal: Proposal, matrix: Matrix, top: Path, dry_run: bool = False) -> dict[Path, str]:
    """Write all files of a patch, and return their paths with their texts. `dry_run` writes nothing.

    OptionError, with nothing written, if one of the files exists.
    """
    tests = "cells" if proposal.distribution == "megatron-core" else "pairs"
    module = top / "patches" / proposal.folder / proposal.name / "__init__.py"
    test = top / "tests" / tests / f"test_{proposal.name}.py"
    file = top / "version_matrix.yaml"
    shown = module.with_name("proof.py")
    news = top / FOLDER / f"{proposal.id}.added.md"
    described = module.with_name(PATCH_FILE)
    for path in (module, described, shown, news, test):
        if path.exists():
            raise OptionError(f"{path} is there already, and shim does not overwrite it")
    entry = text.entry(proposal, ranges(proposal, matrix))
    written = {
        module: text.module(proposal),
        described: text.description(proposal),
        shown: text.proof(proposal),
        file: with_entry(file.read_text("utf-8"), entry, place(proposal.id, proposal.targets, matrix)),
        news: text.news(proposal),
        test: text.test(proposal),
    }
    for path, content in written.items() if not dry_run else ():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, "utf-8")
    return written


def place(id: str, targets: Iterable[str], matrix: Matrix) -> str:
    """The patch behind which the entry of a new one goes; "" for the first place.

    It is the neighbour by name, so that two new patches seldom meet at one line, or the last one that binds a target of
    the new one, which is then outside.
    """
    ids = list(matrix.patches)
    neighbour = max((other for other in ids if other < id), default="")
    sharing = [other for other in ids if set(targets) & set(matrix.patches[other].targets)]
    return max([neighbour, *sharing], key=lambda other: ids.index(other) if other else -1)


def with_entry(matrix: str, entry: str, after: str = "") -> str:
    """The text of a matrix with one more entry behind that of `after`, or as the first. All else stays."""
    document = compose(matrix_path(), matrix.encode())
    patches = next(value for key, value in document.value if key.value == "patches")
    keys = [key for key, _ in patches.value]
    place = next((number for number, key in enumerate(keys, 1) if key.value == after), 0)
    lines = matrix.splitlines(keepends=True)
    end = keys[place].start_mark.line if place < len(keys) else min(patches.end_mark.line, len(lines))
    # Blank lines and comments before the next entry or block belong to that.
    while end > 0 and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
        end -= 1
    if end and not lines[end - 1].endswith("\n"):
        lines[end - 1] += "\n"
    return "".join([*lines[:end], entry, *lines[end:]])


def unfilled(top: Path) -> list[str]:
    """Every place of a checkout that still holds template text: file, line, and what belongs there."""
    patches = top / "patches"
    files = [top / "version_matrix.yaml", *sorted(patches.rglob("*.py")), *sorted(patches.rglob(PATCH_FILE))]
    files += [file for tests in ("cells", "pairs") for file in sorted((top / "tests" / tests).glob("test_*.py"))]
    files += [file for file in fragments(top) if file.is_file()]
    found = []
    for file in files:
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
            _, mark, what = line.partition(text.MARK)
            if mark:
                found.append(f"{file.relative_to(top)}:{number}: {what.partition(chr(34))[0].strip()}")
    return found


def said(proposal: Proposal, written: Mapping[Path, str], left: Sequence[str], dry_run: bool) -> str:
    """What was found and written, as text. `dry_run` shows the whole texts."""
    lines = [*proposal.targets, *(f"  {body}" for body in proposal.bodies), ""]
    if dry_run:
        for path, content in written.items():
            own = re.search(rf"^  {proposal.id}:\n(    .*\n)+", content, re.MULTILINE)
            lines += [f"--- {path}", own[0] if own else content]
        return "\n".join(lines)
    *_, test = written
    folder = test.parent.name
    lines += [f"wrote {path}" for path in written] + ["wrote version_matrix.lock.json"]
    lines += ["", "Fill these places; `shim matrix` lists what is left:"]
    mine = [p for p in left if p.startswith(tuple(map(str, written)))]
    lines += [f"  {place}" for place in mine]
    cell = proposal.variants[next(reversed(proposal.variants))][-1]
    run = f".venv/bin/python -m shim.testing.cells --releases {cell if folder == 'cells' else f'0.19.2+{cell}'}"
    proofs = f"tests/{folder}/test_proofs.py"
    lines += ["", "Write the proof first, and run it on a release that needs the patch:"]
    lines += [f"  {run} -- -q {proofs} -k {proposal.id}", f"  {run} -- -q {test}"]
    lines += ["docs/writing-a-patch.md has each step."]
    return "\n".join(lines)
