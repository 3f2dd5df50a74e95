"""`shim pin --patch`: the pins of single patches, in seconds, and what else a new patch lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from shim._errors import OptionError
from shim._matrix.load import lock_path
from shim._matrix.model import Matrix
from shim._printing.printable import did_you_mean

from .changes import unannounced, wrong_fragments
from .new_patch import unfilled
from .pin import Changed, Evidence, kept_pins, measure, needs_sources
from .pin_all import Fetch, Measured
from .proof_results import read_results
from .tables import recorded_pins, render_pins

__all__ = ["left_to_do", "measure_some", "without_results"]

PROVE = ".venv/bin/python -m shim.maintenance.prove_all"


def measure_some(
    matrix: Matrix,
    ids: Sequence[str],
    fetch: Fetch,
    at_hand: Callable[[str, str], bool],
    progress: Callable[[str], None],
    proved: Evidence | None = None,
) -> Measured:
    """Measure the patches `ids`. The pins of the others stay, and so does the table of files.

    That table spares a plan the parsing, and a release brings it up to date: two patches that bind names of one file
    would conflict in it.

    A commit that is not at hand keeps its pins of them. Where the rules have changed since, it has none, see `lacking`.

    proved: what proofs have shown, by patch.
    at_hand: whether `fetch(distribution, commit)` needs no network.

    OptionError if there is no such patch. MatrixError as `shim.maintenance.pin.measure` raises it.
    """
    unknown = [id for id in ids if id not in matrix.patches]
    if unknown:
        hint = did_you_mean(unknown[0], matrix.patches)
        raise OptionError(f"there is no patch {unknown[0]!r} in {matrix.path}" + (f"; {hint}" if hint else ""))
    path = Path(matrix.path).absolute()
    lock = lock_path(path)
    recorded = recorded_pins(lock.read_bytes(), matrix.patches) if lock.is_file() else {}
    entries = {id: matrix.patches[id] for id in ids}
    of = {entry.distribution for entry in entries.values()}
    alone = replace(
        matrix,
        patches=entries,
        supported={name: releases for name, releases in matrix.supported.items() if name in of},
        commits={
            name: {commit: found for commit, found in commits.items() if at_hand(name, commit)}
            for name, commits in matrix.commits.items()
            if name in of
        },
    )
    pins = measure(alone, fetch, lambda d, name: progress(f"{d} {matrix.shown(d, name)}"), None, recorded, proved)
    missing: dict[str, str] = {}
    changed: list[Changed] = []
    for distribution in alone.commits:
        for name in (name for name in matrix.commits[distribution] if name not in alone.commits[distribution]):
            there = recorded.get(distribution, {}).get(name, {})
            pins[distribution][name], amiss = kept_pins(replace(matrix, patches=entries), distribution, name, there)
            changed += amiss
            if not amiss:
                shown = f"{distribution} {matrix.shown(distribution, name)}"
                missing[name] = f"{shown} is not at hand and keeps its pins"
    all_pins = {
        distribution: {
            name: {
                id: pin
                for id in matrix.patches  # in the order in which all of them are measured
                if (pin := (pins if id in entries else recorded).get(distribution, {}).get(name, {}).get(id))
            }
            for name in matrix.names(distribution)
        }
        for distribution in {**matrix.supported, **matrix.commits}
    }
    return Measured(matrix, render_pins(all_pins), {}, missing, needs_sources(changed))


def left_to_do(top: Path, matrix: Matrix, id: str) -> list[str]:
    """What a patch of the source tree `top` still lacks, a line each: what the tests would say many minutes later."""
    left = [*unfilled(top), *wrong_fragments(top, matrix.patches)]
    mine, ids = _bound(matrix, id), list(matrix.patches)
    for other in (other for other in ids if other != id):
        shared = sorted({target for _, target in mine & _bound(matrix, other)})
        inside, outside = sorted((id, other), key=ids.index)
        if shared and inside not in matrix.patches[outside].outside_of:
            left.append(
                f"patch.yaml: {outside} is outside of {inside} on {', '.join(shared)}: say why that is right under "
                f"`outside_of` of {outside}, or move its entry in version_matrix.yaml"
            )
    for key, what in (
        ("symptom", "what goes wrong without it"),
        ("concerns", "which runs it concerns"),
        ("per_model", "what it reads of a config, and its options"),
    ):
        if not getattr(matrix.patches[id], key):
            left.append(f"patch.yaml: no {key} of {id}: {what}")
    distribution = matrix.patches[id].distribution
    without = [name for name in matrix.commits.get(distribution, {}) if matrix.wanted(id, name) is None]
    if without:
        where = ", ".join(matrix.shown(distribution, name) for name in without)
        left.append(
            f"version_matrix.lock.json: no pins of {id} on {where}: no variant has its bodies, see docs/evidence.md"
        )
    releases = without_results(matrix, id)
    if releases:
        left.append(f"proved.json: no results on {', '.join(releases)}; run {PROVE} --patches {id}")
    return left + unannounced(top, id)


def without_results(matrix: Matrix, id: str) -> list[str]:
    """The releases of megatron-core on which no proof of the patch has run."""
    cells = {cell for proof in read_results(matrix.patches[id]).values() for cell in proof}
    ran = {cell.partition("+")[0] for cell in cells}
    return [release for release in matrix.supported["megatron-core"] if release not in ran]


def _bound(matrix: Matrix, id: str) -> set[tuple[str, str]]:
    """The targets of a patch on each release and commit, as (name, target)."""
    entry = matrix.patches[id]
    given = [(name, entry.variants.get(matrix.wanted(id, name) or "")) for name in matrix.names(entry.distribution)]
    return {(name, target) for name, variant in given if variant is not None for target in variant.targets}
