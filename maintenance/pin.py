"""Pins: measure variants and fingerprints on real releases and commits, and write them beside the matrix."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shim._errors import MatrixError, SourceError
from shim._matrix.load import lock_path
from shim._matrix.model import NOT_NEEDED, RIGHT, UPSTREAM, Matrix, PatchEntry, Pin, Rule, Variant
from shim._planning.evidence import FIXED, LACKING, Proved, digest_of_bodies, shipped_evidence
from shim._planning.evidence import RIGHT as RIGHT_ON_STOCK
from shim._releases.fingerprint import fingerprint
from shim._releases.known_files import measure_files
from shim._releases.sources import Sources
from shim.testing.repositories import REPOSITORIES

__all__ = ["Evidence", "kept_pins", "measure", "measure_one", "needs_sources", "replace_file", "write"]

Pins = Mapping[str, Mapping[str, Mapping[str, Pin]]]  # distribution -> release or commit -> patch id -> pin

Evidence = Mapping[str, Sequence[Proved]]  # patch id -> what its proofs have shown


def _or_none(sources: Sources, target: str, variant: Variant | None = None) -> str | None:
    try:
        return fingerprint(sources, target) if variant is None else variant.fingerprint(sources, target)
    except SourceError:
        return None


def _measure(entry: PatchEntry, gives: str, sources: Sources) -> Pin | None:
    """The pin that gives a variant, or one of RIGHT. None if nothing of a right release is there to pin."""
    if gives in RIGHT:
        found = {target: value for target in entry.bodies if (value := _or_none(sources, target))}
        return Pin(None, found) if found else None
    variant = entry.variants[gives]
    return Pin(gives, {t: variant.fingerprint(sources, t) for t in variant.bodies})


def measure_one(
    matrix: Matrix,
    entry: PatchEntry,
    name: str,
    sources: Sources,
    known: Mapping[str, Mapping[str, Pin]],
    recorded: Mapping[str, Mapping[str, Pin]] | None = None,
    proved: Sequence[Proved] = (),
) -> Pin | None:
    """The pin of one patch on a release or commit with these sources. None if the rules give it none.

    known: the pins of the other releases and commits of the distribution.
    recorded: the pins that there were before. A release that the patch had no pin for is checked, see `_undecided`.
    proved: what the proofs of the patch have shown, on any sources.
    """
    if name in matrix.commits.get(entry.distribution, {}):
        return _on_commit(matrix, entry, name, sources, known)
    gives = matrix.wanted(entry.id, name)
    try:
        pin = None if gives is None else _measure(entry, gives, sources)
    except SourceError as error:
        shown = f"{entry.distribution} {matrix.shown(entry.distribution, name)}"
        remedy = "Remedy: correct the targets of the variant or the ranges in version_matrix.yaml"
        raise MatrixError(f"{entry.id}: the rules give variant {gives} to {shown}, but {error}. {remedy}.") from None
    if pin is not None and recorded:
        undecided = [] if _is_proved(entry, pin, proved) else _undecided(matrix, entry, name, sources, pin, recorded)
        if undecided:
            raise MatrixError("; ".join(undecided))
    return pin


def _is_proved(entry: PatchEntry, pin: Pin, proved: Sequence[Proved]) -> bool:
    """Whether proofs have shown on exactly these bodies what the pin gives, in `proved` or on a known tree."""
    verdicts = (RIGHT_ON_STOCK, LACKING) if pin.variant is None else (FIXED,)
    here = pin.variant, digest_of_bodies(pin.fingerprints)
    return any(
        said.verdict in verdicts and (said.variant, said.bodies) == here and not said.dropped
        for said in (*proved, *shipped_evidence(entry.id))
    )


def _undecided(
    matrix: Matrix,
    entry: PatchEntry,
    name: str,
    sources: Sources,
    pin: Pin,
    recorded: Mapping[str, Mapping[str, Pin]],
) -> list[str]:
    """What nobody has decided about a release that the patch has no pin for yet: its version alone speaks for the pin.

    A body that no release with the same pin has must stand under `decided`, unless proofs have run. A patch without any
    pin is new, and whoever writes it decides.
    """
    before = {release: pins[entry.id] for release, pins in recorded.items() if entry.id in pins}
    if not before or name in before:
        return []
    same = [other.fingerprints for other in before.values() if other.variant == pin.variant]
    if pin.variant is None and _is_seen_to_be_right(entry, matrix.wanted(entry.id, name), pin, same):
        return []
    gives = matrix.wanted(entry.id, name)
    decided = {(d.target, d.body) for d in entry.decided if d.gives == gives}
    shown = f"{entry.distribution} {matrix.shown(entry.distribution, name)}"
    found = []
    for target, body in pin.fingerprints.items():
        if any(others.get(target) == body for others in same) or (target, body) in decided:
            continue
        if pin.variant is not None and not same:
            continue  # a variant that no release has was written for this one
        why = "and nothing shows that it is right" if pin.variant is None else "and the ranges alone give it a variant"
        found.append(
            f"{entry.id}: nobody has seen {target} of {shown}, {why}. Remedy: let the proofs decide (shim pin --prove "
            "--against TREE), or read it (shim audit) and correct the ranges if the patch does not fit. "
            "If the change is beside the point, say so under `decided` of the patch: "
            f'{{target: "{target}", body: "{body}", as: {gives}, note: ...}}'
        )
    return found


def _is_seen_to_be_right(entry: PatchEntry, gives: str | None, pin: Pin, others: Sequence[Mapping[str, str]]) -> bool:
    """Whether all bodies are those of another release that is right, or none is there to be wrong."""
    lacks_all = gives == NOT_NEEDED and pin.fingerprints.keys().isdisjoint(entry.targets)
    return pin.fingerprints in others or lacks_all


def _on_commit(
    matrix: Matrix, entry: PatchEntry, name: str, sources: Sources, known: Mapping[str, Mapping[str, Pin]]
) -> Pin | None:
    """The pin of a commit: what the proofs have shown there, or what the bodies of releases say.

    None if only the version of the commit speaks for what the rules give. Once it is pinned, a body is right wherever
    it is found.
    """
    releases = [known[release] for release in matrix.supported.get(entry.distribution, ())]
    of_releases = [pins[entry.id] for pins in releases if entry.id in pins]
    rule = entry.pinned_rule(matrix.version(entry.distribution, name))
    shown = _proved_on(entry, name) or _alike(entry, rule, sources, of_releases)
    gives = shown or (None if rule is None else rule.gives)
    try:
        pin = None if gives is None else _measure(entry, gives, sources)
    except SourceError:
        return None
    speak = pin is None or gives is None or shown or _speak_for(entry, gives, pin, of_releases)
    return pin if speak else None


def _proved_on(entry: PatchEntry, name: str) -> str | None:
    """The variant that fixes a known tree, or UPSTREAM if it is right without. None if nothing of this was shown."""
    for said in shipped_evidence(entry.id):
        if name not in said.trees or said.dropped:  # a pin would bind the parts that were not shown
            continue
        if said.verdict == FIXED and said.variant in entry.variants:
            return said.variant
        if said.verdict in (RIGHT_ON_STOCK, LACKING):
            return UPSTREAM
    return None


def _alike(entry: PatchEntry, rule: Rule | None, sources: Sources, of_releases: Sequence[Pin]) -> str | None:
    """The variant of which all bodies are in releases, or UPSTREAM if one is right that has the same. None: neither.

    Of several that of the rule, or else that with the most bodies, as a plan takes it.
    """
    known = _known(of_releases)
    by_rule = "" if rule is None else rule.gives
    for variant in sorted(entry.most_bodies_first, key=lambda variant: variant.name != by_rule):
        bodies = {target: _or_none(sources, target, variant) for target in variant.bodies}
        if all(body in known.get(variant.name, {}).get(target, ()) for target, body in bodies.items()):
            return variant.name
    here = _measure(entry, UPSTREAM, sources)
    right = (pin.fingerprints for pin in of_releases if pin.variant is None)
    return UPSTREAM if here is not None and here.fingerprints in right else None


def _known(pins: Sequence[Pin]) -> dict[str | None, dict[str, set[str]]]:
    """The bodies of each variant, by target."""
    known: dict[str | None, dict[str, set[str]]] = {}
    for pin in pins:
        for target, body in pin.fingerprints.items():
            known.setdefault(pin.variant, {}).setdefault(target, set()).add(body)
    return known


def _speak_for(entry: PatchEntry, gives: str, pin: Pin, of_releases: Sequence[Pin]) -> bool:
    """Whether the bodies of a commit speak for what the rules give: releases with the same pin have each of them."""
    if pin.variant is None:
        right = [other.fingerprints for other in of_releases if other.variant is None]
        return _is_seen_to_be_right(entry, gives, pin, right)
    known = _known(of_releases)
    # A variant that no release has was written for commits such as this one.
    return pin.variant not in known or all(
        body in known[pin.variant].get(target, ()) for target, body in pin.fingerprints.items()
    )


def measure(
    matrix: Matrix,
    fetch: Callable[[str, str], Path | None],
    progress: Callable[[str, str], None] | None = None,
    files: dict[str, dict[str, dict[str, str]]] | None = None,
    recorded: Pins | None = None,
    proved: Evidence | None = None,
) -> dict[str, dict[str, dict[str, Pin]]]:
    """The pins of every patch on every supported release and commit. `fetch(distribution, name)` gives its sources.

    All sources are fetched before the first is read, so that what is missing is said at the start, and all of it.

    files: a table to fill with the files and bodies of all releases, see shim._releases.known_files.
    recorded: the pins that there were. A commit whose sources are not at hand (`fetch` gives None) keeps them.
    proved: what proofs have shown, by patch.
    """
    recorded, proved = recorded or {}, proved or {}
    places = [(distribution, name) for distribution in _distributions(matrix) for name in matrix.names(distribution)]
    roots = {place: fetch(*place) for place in places}
    kept, changed = {}, []
    for place in (place for place, root in roots.items() if root is None):
        kept[place], amiss = kept_pins(matrix, *place, recorded.get(place[0], {}).get(place[1], {}))
        changed += amiss
    if changed:
        raise MatrixError(needs_sources(changed))
    pins: dict[str, dict[str, dict[str, Pin]]] = {}
    wrong: list[str] = []
    bodies = sorted({body for entry in matrix.patches.values() for body in entry.bodies})
    for (distribution, name), root in roots.items():
        if progress is not None:
            progress(distribution, name)
        of_distribution = pins.setdefault(distribution, {})
        found = kept.get((distribution, name), {})
        if root is not None:
            sources = Sources([root])
            if files is not None:
                measure_files(sources, bodies, files)
            for id, entry in matrix.patches.items():
                if entry.distribution != distribution:
                    continue
                try:
                    before, said = recorded.get(distribution), proved.get(id, ())
                    pin = measure_one(matrix, entry, name, sources, of_distribution, before, said)
                except MatrixError as error:
                    wrong.append(str(error))
                    continue
                if pin is not None:
                    found[id] = pin
        of_distribution[name] = found
    if wrong:
        raise MatrixError("; ".join(wrong))
    return pins


def _distributions(matrix: Matrix) -> list[str]:
    return list({**matrix.supported, **matrix.commits})


Changed = tuple[str, str, str]  # distribution, patch id with its variant, commit


def kept_pins(
    matrix: Matrix, distribution: str, name: str, recorded: Mapping[str, Pin]
) -> tuple[dict[str, Pin], list[Changed]]:
    """The recorded pins of a commit, and what has changed since, so that its sources are needed."""
    kept: dict[str, Pin] = {}
    changed: list[Changed] = []
    for id, pin in recorded.items():
        entry = matrix.patches.get(id)
        if entry is None or entry.distribution != distribution:
            continue
        if pin.variant is None:
            known = {target: value for target, value in pin.fingerprints.items() if target in entry.bodies}
            kept[id] = Pin(None, known)
            continue
        # A variant that is gone was renamed, if there is one with the same targets and reads.
        same = [found.name for found in entry.variants.values() if pin.fingerprints.keys() == set(found.bodies)]
        now = pin.variant if pin.variant in entry.variants else next(iter(same), "")
        if now in same:
            kept[id] = Pin(now, pin.fingerprints)
        else:
            changed.append((distribution, f"{id} ({pin.variant})", matrix.shown(distribution, name)))
    return kept, changed


def needs_sources(changed: Sequence[Changed]) -> str:
    """An error message: the commits whose sources are needed, each patch once, and the remedy."""
    said = []
    for distribution in dict.fromkeys(distribution for distribution, _, _ in changed):
        commits = list(dict.fromkeys(commit for of, _, commit in changed if of == distribution))
        patches = list(dict.fromkeys(patch for of, patch, _ in changed if of == distribution))
        variable, url = REPOSITORIES[distribution].variable, REPOSITORIES[distribution].url
        said.append(
            f"{', '.join(patches)}: not what was pinned on {distribution} {', '.join(commits)}, whose sources are not "
            f"at hand. Remedy: name a clone that has the commits in {variable} (git clone {url})."
        )
    return " ".join(said)


def write(path: str | os.PathLike[str], text: str) -> bool:
    """Write `text` as the pins of the matrix at `path`. Returns whether the file has changed."""
    return replace_file(lock_path(Path(path)), text.encode())


def replace_file(file: Path, content: bytes) -> bool:
    """Give `file` this content, whole or not at all. Returns whether it had another."""
    if file.exists() and file.read_bytes() == content:
        return False
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}-", delete=False) as scratch:
        scratch.write(content)
    place = Path(scratch.name)
    place.chmod(file.stat().st_mode & 0o777 if file.exists() else 0o644)
    place.replace(file)
    return True
