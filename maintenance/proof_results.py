"""What the proofs of each patch have shown on the supported releases: proved.json in the folder of the patch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from shim._matrix.load import patches_path
from shim._matrix.model import Matrix, PatchEntry

__all__ = ["FILE", "Results", "as_text", "read_proved", "read_results", "recorded", "results_path"]

FILE = "proved.json"

# label of a proof -> cell, such as "0.16.1+2.9.0" -> {"verdict": ..., "stock": ..., "with_shim": ...}
Results = dict[str, dict[str, dict[str, str]]]


def results_path(entry: PatchEntry) -> Path:
    """The file of a patch."""
    return patches_path().joinpath(*entry.module.split(".")[2:], FILE)


def read_results(entry: PatchEntry) -> Results:
    """The results of a patch. Empty if none are recorded."""
    file = results_path(entry)
    found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return {label: dict(_by_cell(runs)) for label, runs in found.items()}


def _by_cell(runs: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, str]]]:
    for run in runs:
        yield from ((cell, {key: value for key, value in run.items() if key != "on"}) for cell in run["on"])


def as_text(results: Results) -> str:
    """The content of a file: a line for each result of a proof, with the cells that gave it, the oldest first."""
    proofs = []
    for label, cells in sorted(results.items()):
        alike: dict[str, list[str]] = {}
        for cell in sorted(cells, key=_age):
            alike.setdefault(json.dumps(cells[cell]), []).append(cell)
        lines = (f'  {{"on": {json.dumps(on)}, {found[1:]}' for found, on in alike.items())
        proofs.append(f" {json.dumps(label)}: [\n" + ",\n".join(lines) + "\n ]")
    return "{\n" + ",\n".join(proofs) + "\n}\n"


def _age(cell: str) -> list[Version]:
    return [Version(release) for release in cell.split("+")]


def recorded(data: Mapping[str, Any], cell: str, before: Results) -> Results:
    """The results of a patch with those of one more cell, of which nothing earlier stays: words and no seconds.

    data: the proofs of the patch in the output of `shim prove --json`.
    """
    release = cell.partition("+")[0]
    kept = {
        label: {other: found for other, found in cells.items() if other.partition("+")[0] != release}
        for label, cells in before.items()
    }
    found: Results = {
        label: {
            **kept.get(label, {}),
            cell: {
                "verdict": said["verdict"],
                **{side: (said[side] or {"text": ""})["text"] for side in ("stock", "with_shim")},
            },
        }
        for label, said in data.items()
        if said["proof"]
    }
    return found | {label: cells for label, cells in kept.items() if cells and label not in found}


def read_proved(matrix: Matrix) -> dict[str, Any]:
    """The results of all patches: release -> {"transformer-engine": release beside it, "proofs": {label: ...}}."""
    found: dict[str, Any] = {}
    for entry in matrix.patches.values():
        for label, cells in read_results(entry).items():
            for cell, said in cells.items():
                release, _, te = cell.partition("+")
                run = found.setdefault(release, {"transformer-engine": te, "proofs": {}})
                run["proofs"][label] = said
    return {release: found[release] for release in matrix.supported["megatron-core"] if release in found}
