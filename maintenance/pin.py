"""Pins: measure variants and fingerprints on real releases and commits, and write them beside the matrix."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shim._errors import MatrixError, SourceError
from shim._matrix.commits import NONE
from shim._matrix.model import NOT_NEEDED, RIGHT, UPSTREAM, Matrix, PatchEntry, Pin, Variant
from shim._matrix.pins import lock_path
from shim._planning.contract import breach, shows
from shim._releases.fingerprint import fingerprint
from shim._releases.known_files import measure_files
from shim._releases.sources import Sources
from shim.testing.repositories import REPOSITORIES

__all__ = ["kept_pins", "measure", "measure_one", "needs_sources", "replace_file", "write"]

Pins = Mapping[str, Mapping[str, Mapping[str, Pin]]]  # distribution -> release or commit -> patch id -> pin


def _or_none(sources: Sources, target: str, variant: Variant | None = None) -> str | None:
    try:
        return fingerprint(sources, target) if variant is None else variant.fingerprint(sources, target)
    except SourceError:
        return None


def _measure(matrix: Matrix, entry: PatchEntry, name: str, sources: Sources) -> Pin | None:
    wanted = matrix.wanted(entry.id, name)
    if wanted is None:
        return None
    if wanted in RIGHT:
        found = {target: value for target in entry.bodies if (value := _or_none(sources, target))}
        return Pin(None, found) if found else None
    variant = entry.variants[wanted]
    try:
        return Pin(wanted, {t: variant.fingerprint(sources, t) for t in variant.bodies})
    except SourceError as error:
        shown = f"{entry.distribution} {matrix.shown(entry.distribution, name)}"
        remedy = "Remedy: correct the targets of the variant or the ranges in version_matrix.yaml"
        if name in matrix.commits.get(entry.distribution, {}):
            remedy += (
                f", or name the variant of {entry.id} under the variants of the commit (none: it has no pin there)"
            )
        raise MatrixError(f"{entry.id}: the rules give variant {wanted} to {shown}, but {error}. {remedy}.") from None


def measure_one(
    matrix: Matrix,
    entry: PatchEntry,
    name: str,
    sources: Sources,
    known: Mapping[str, Mapping[str, Pin]],
    recorded: Mapping[str, Mapping[str, Pin]] | None = None,
) -> Pin | None:
    """The pin of one patch on a release or commit with these sources. None if the rules give it none.

    known: the pins of the other releases and commits of the distribution.
    recorded: the pins that there were before. A release that the patch had no pin for is checked, see `_undecided`.
    """
    pin = _measure(matrix, entry, name, sources)
    if pin is not None and name in matrix.commits.get(entry.distribution, {}):
        releases = {release: known[release] for release in matrix.supported.get(entry.distribution, ())}
        _check_against_releases(matrix, entry, name, sources, pin, releases)
    elif pin is not None and recorded:
        undecided = _undecided(matrix, entry, name, sources, pin, recorded)
        if undecided:
            raise MatrixError("; ".join(undecided))
    return pin


def _undecided(
    matrix: Matrix,
    entry: PatchEntry,
    name: str,
    sources: Sources,
    pin: Pin,
    recorded: Mapping[str, Mapping[str, Pin]],
) -> list[str]:
    """What nobody has decided about a release that the patch has no pin for yet: its version alone speaks for the pin.

    A body that no release with the same pin has must keep its contract, or stand under `decided`. A release that is
    right may show a sign of it instead. A patch without any pin is new, and whoever writes it decides.
    """
    before = {release: pins[entry.id] for release, pins in recorded.items() if entry.id in pins}
    if not before or name in before:
        return []
    same = [other.fingerprints for other in before.values() if other.variant == pin.variant]
    if pin.variant is None and _is_seen_to_be_right(entry, matrix.wanted(entry.id, name), sources, pin, same):
        return []
    gives = matrix.wanted(entry.id, name)
    decided = {(d.target, d.body) for d in entry.decided if d.gives == gives}
    shown = f"{entry.distribution} {matrix.shown(entry.distribution, name)}"
    found = []
    for target, body in pin.fingerprints.items():
        if any(others.get(target) == body for others in same) or (target, body) in decided:
            continue
        why = "and nothing shows that it is right"
        if pin.variant is not None:
            why = _breach(sources, entry.variants[pin.variant], target, bool(same))
        if why:
            found.append(
                f"{entry.id}: nobody has seen {target} of {shown}, {why}. Remedy: read it (shim audit), and correct "
                "the ranges if the patch does not fit. If the change is beside the point, say so under `decided` of "
                f'the patch: {{target: "{target}", body: "{body}", as: {gives}, note: ...}}'
            )
    return found


def _is_seen_to_be_right(
    entry: PatchEntry, gives: str | None, sources: Sources, pin: Pin, others: Sequence[Mapping[str, str]]
) -> bool:
    """Whether all bodies are those of another release that is right, or show a sign, or none is there to be wrong."""
    lacks_all = gives == NOT_NEEDED and pin.fingerprints.keys().isdisjoint(entry.targets)
    signs = (*entry.fixed, *entry.lacking)
    return pin.fingerprints in others or lacks_all or any(shows(sources, sign) for sign in signs)


def _check_against_releases(
    matrix: Matrix, entry: PatchEntry, name: str, sources: Sources, pin: Pin, releases: Mapping[str, Mapping[str, Pin]]
) -> None:
    """Raise MatrixError if only the version of a commit speaks for its variant, and its bodies speak against it.

    A body that no release has must keep its contract, and another variant must not have all bodies. Once it is pinned,
    a body is right wherever it is found.

    pin: what the rules give.    releases: the pins of the releases.
    """
    if entry.id in matrix.commits[entry.distribution][name].variants:
        return  # a person has decided
    known: dict[str | None, dict[str, set[str]]] = {}
    for pins in releases.values():
        if entry.id in pins:
            for target, body in pins[entry.id].fingerprints.items():
                known.setdefault(pins[entry.id].variant, {}).setdefault(target, set()).add(body)

    def unknown(variant: str | None, bodies: Mapping[str, str | None]) -> list[str]:
        return [target for target, body in bodies.items() if body not in known.get(variant, {}).get(target, ())]

    new = unknown(pin.variant, pin.fingerprints)
    if not new:
        return
    against = [
        f"it has all bodies of variant {other.name}"
        for other in entry.variants.values()
        if other.name != pin.variant and not unknown(other.name, {t: _or_none(sources, t, other) for t in other.bodies})
    ]
    if pin.variant is None:
        right = [
            pins[entry.id].fingerprints for pins in releases.values() if entry.id in pins and not pins[entry.id].variant
        ]
        if not _is_seen_to_be_right(entry, matrix.wanted(entry.id, name), sources, pin, right):
            against.append(f"nothing shows that it is right, and nobody has seen its {new[0]}")
    else:
        variant, of_releases = entry.variants[pin.variant], pin.variant in known
        against += [
            f"nobody has seen its {target}, {why}"
            for target in new
            if (why := _breach(sources, variant, target, of_releases))
        ]
    if against:
        raise MatrixError(
            f"{entry.id}: by its version {entry.distribution} {matrix.shown(entry.distribution, name)} has "
            f"{matrix.wanted(entry.id, name)}, but {against[0]}. Remedy: name the right variant, {', '.join(RIGHT)} or "
            f"{NONE} under the variants of the commit in version_matrix.yaml."
        )


def _breach(sources: Sources, variant: Variant, target: str, of_releases: bool) -> str:
    """Why an unknown body does not fit the variant. "" if it keeps its contract.

    of_releases: whether a release has the variant. One that no release has was written for commits such as this one.
    """
    if target not in variant.needs:
        return "and there is no contract of it" if of_releases else ""
    said = breach(sources, variant.inherits(target) or target, variant.needs[target])
    return f"which breaks its contract: {said}" if said else ""


def measure(
    matrix: Matrix,
    fetch: Callable[[str, str], Path | None],
    progress: Callable[[str, str], None] | None = None,
    files: dict[str, dict[str, dict[str, str]]] | None = None,
    recorded: Pins | None = None,
) -> dict[str, dict[str, dict[str, Pin]]]:
    """The pins of every patch on every supported release and commit. `fetch(distribution, name)` gives its sources.

    All sources are fetched before the first is read, so that what is missing is said at the start, and all of it.

    files: a table to fill with the files and bodies of all releases, see shim._releases.known_files.
    recorded: the pins that there were. A commit whose sources are not at hand (`fetch` gives None) keeps them.
    """
    recorded = recorded or {}
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
                    pin = measure_one(matrix, entry, name, sources, of_distribution, recorded.get(distribution))
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
    """The recorded pins of a commit, and what the rules have changed since, so that its sources are needed."""
    kept: dict[str, Pin] = {}
    changed: list[Changed] = []
    for id, entry in matrix.patches.items():
        wanted = matrix.wanted(id, name) if entry.distribution == distribution else None
        if wanted is None:
            continue
        pin = recorded.get(id)
        if pin is None and wanted in RIGHT:
            continue  # the commit has none of the bodies
        bodies = None if wanted in RIGHT else set(entry.variants[wanted].bodies)
        same = pin is not None and (bodies is None or pin.fingerprints.keys() == bodies)
        # A variant that is gone was renamed, if the one that the rules give has the same targets and reads.
        renamed = pin is not None and bodies is not None and pin.variant not in (None, *entry.variants)
        if pin is None or not same or not (renamed or (pin.variant or UPSTREAM) == matrix.pinned_as(id, name)):
            changed.append((distribution, f"{id} ({wanted})", matrix.shown(distribution, name)))
            continue
        known = {target: value for target, value in pin.fingerprints.items() if target in entry.bodies}
        kept[id] = Pin(matrix.pinned_as(id, name) if renamed else pin.variant, known)
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
