"""All pins and tables of a matrix, measured anew, as `shim pin --releases` and `shim pin --check` do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shim._errors import NotMetError
from shim._matrix import load
from shim._matrix.load import lock_path
from shim._matrix.model import Matrix
from shim._releases import known_files
from shim._te import names, tables

from .pin import Evidence, measure, write
from .tables import recorded_pins, render_files, render_pins
from .te_losses import MORE_TE, measure_losses, render_losses
from .te_names import measure_names, render_names

__all__ = ["Measured", "measure_all", "tables_of_names", "write_all"]

Fetch = Callable[[str, str], Path]
Tables = dict[str, dict[str, dict[str, str]]]


@dataclass(frozen=True)
class Measured:
    """The text of the pins, and of the tables that ship with the matrix of shim.

    missing: a line for each commit whose sources could not be fetched. They keep their pins.
    lacking: which commits have no pin of a patch, because their sources are needed, and the remedy. "" for none.
    """

    matrix: Matrix
    pins: str
    tables: Mapping[Path, str]
    missing: Mapping[str, str] = field(default_factory=dict)  # name of the commit -> the line
    lacking: str = ""

    def stale(self) -> bool:
        """Whether a file on disk is not what was measured."""
        wanted = {lock_path(Path(self.matrix.path)): self.pins, **self.tables}
        return any(not file.is_file() or file.read_text("utf-8") != text for file, text in wanted.items())


def measure_all(
    matrix: Matrix,
    fetch: Fetch,
    progress: Callable[[str], None],
    *,
    anew: bool = True,
    proved: Evidence | None = None,
) -> Measured:
    """Measure every release and commit. A release that cannot be fetched is an error, see NotMetError.

    proved: what proofs have shown, by patch.
    anew: False keeps what the tables of names say of releases that they have, which takes most of the time. That is
        right as long as the code that measures them has not changed.
    """
    total, done = sum(len(matrix.names(name)) for name in {**matrix.supported, **matrix.commits}), 0
    gone: dict[str, str] = {}

    def say(distribution: str, name: str) -> None:
        nonlocal done
        done += 1
        progress(f"{distribution} {matrix.shown(distribution, name)} ({done} of {total})")

    def fetched(distribution: str, name: str) -> Path | None:
        try:
            return fetch(distribution, name)
        except NotMetError as error:
            shown = f"{distribution} {matrix.shown(distribution, name)}"
            gone[name] = f"{shown} is not at hand and keeps its pins: {' '.join(str(error).split())}"
            return None

    path = Path(matrix.path).absolute()
    shipped = path == load.matrix_path()  # the tables ship with this matrix only
    _require_releases(matrix, fetch, shipped)
    files: Tables = {}
    before = lock_path(path)
    recorded = recorded_pins(before.read_bytes(), matrix.patches) if before.is_file() else {}
    pins = render_pins(measure(matrix, fetched, say, files, recorded, proved))
    written: dict[Path, str] = {}
    if shipped:
        if gone:
            _keep_files(matrix, files)
        written = {known_files.FILE: render_files(files), **tables_of_names(matrix, fetch, progress, anew)}
    return Measured(matrix, pins, written, gone)


def _require_releases(matrix: Matrix, fetch: Fetch, shipped: bool) -> None:
    """Fetch all that nothing can stand for. NotMetError with each that cannot be fetched, before any is read.

    shipped: whether the tables are measured, too, for which more TE releases are read.
    """
    wanted = [(name, release) for name, releases in matrix.supported.items() for release in releases]
    known = (_json(tables.FILE) or {}).get(tables.TE, ()) if shipped else ()
    wanted += [(tables.TE, release) for release in MORE_TE] if shipped else []
    wanted += [
        (tables.TE, name)
        for name, commit in matrix.commits.get(tables.TE, {}).items()
        if shipped and commit.tagged and commit.version not in known
    ]
    missing: dict[str, NotMetError] = {}
    for distribution, release in wanted:
        try:
            fetch(distribution, release)
        except NotMetError as error:
            missing[f"{distribution} {matrix.shown(distribution, release)}"] = error
    if missing:
        raise NotMetError(f"{', '.join(missing)} cannot be fetched: {next(iter(missing.values()))}")


def _keep_files(matrix: Matrix, files: Tables) -> None:
    """Add what the shipped table knows of other files: nobody can tell which of them a missing commit has."""
    bodies = {body for entry in matrix.patches.values() for body in entry.bodies}
    for module, digests in known_files.known_files().items():
        for digest, values in digests.items():
            kept = {qualname: value for qualname, value in values.items() if f"{module}:{qualname}" in bodies}
            if kept and digest not in files.get(module, {}):
                files.setdefault(module, {})[digest] = kept


def tables_of_names(matrix: Matrix, fetch: Fetch, progress: Callable[[str], None], anew: bool) -> dict[Path, str]:
    """The names that megatron-core imports of Transformer Engine, and what it loses without them."""
    megatrons, te_releases = (
        [(release, fetch(name, release)) for release in matrix.supported[name]] for name in (tables.MEGATRON, tables.TE)
    )
    more = [(release, fetch(tables.TE, release)) for release in MORE_TE]
    wanted_before, lost_before = _json(names.FILE), _json(tables.FILE)
    tagged, missing = _tagged(matrix, fetch, (lost_before or {}).get(tables.TE, ()))
    progress("names that megatron-core wants of Transformer Engine")
    wanted = measure_names(megatrons, te_releases, None if anew else wanted_before)
    kept = missing if anew else None
    losses = measure_losses(megatrons, [*more, *tagged, *te_releases], progress, lost_before, kept)
    return {names.FILE: render_names(wanted), tables.FILE: render_losses(losses)}


def _tagged(matrix: Matrix, fetch: Fetch, known: Sequence[str]) -> tuple[list[tuple[str, Path]], list[str]]:
    """The TE releases that only a tag has, by version, and those among them whose sources are not at hand.

    known: the releases in the table that there is. It keeps what it says of a release that is not at hand.
    """
    found: list[tuple[str, Path]] = []
    missing: list[str] = []
    for name, commit in matrix.commits.get("transformer-engine", {}).items():
        if commit.tagged:
            try:
                found.append((commit.version, fetch("transformer-engine", name)))
            except NotMetError:
                if commit.version not in known:
                    raise
                missing.append(commit.version)
                found.append((commit.version, Path(name)))  # nothing is read from there
    return found, missing


def _json(file: Path) -> Any:
    """The content of a table. None if it is missing or empty."""
    return (json.loads(file.read_text("utf-8")) or None) if file.is_file() else None


def write_all(found: Measured) -> bool:
    """Write the pins and the tables. Returns whether a file has changed.

    MatrixError, with nothing written, if rules and pins contradict each other: for instance if a release that is said
    to be right without a patch has the bodies of one that needs it.
    """
    path = Path(found.matrix.path)
    lock = (lock_path(path), found.pins.encode())
    load.read_content(path, path.read_bytes(), lock)
    changed = write(found.matrix.path, found.pins)
    for file, text in found.tables.items():
        if not file.exists() or file.read_text("utf-8") != text:
            file.write_text(text, "utf-8")
            changed = True
    return changed
