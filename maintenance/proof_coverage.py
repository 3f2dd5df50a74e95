"""Measure which bodies of patches no proof runs: for developers of shim.

A proof speaks only for bodies that it runs, so a body that none runs can never be proved on an unknown tree. On each
release all proofs of all patches run that are to be applied there, and their processes tell which bodies were called:
on stock or with the patch. A variant misses what its proofs have run on none of the releases that get it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shim._matrix.load import PACKAGE
from shim.testing.cells import EVERYDAY
from shim.testing.releases import environment, fetch

from .prove_all import of_its_time

__all__ = ["RECORD", "as_text", "main", "missed", "table"]

RECORD = "proved_coverage.json"  # in docs
CELLS = tuple(f"{release}+{of_its_time(release)}" for release in EVERYDAY)

Covered = Mapping[str, Mapping[str, Mapping[str, Any]]]  # cell -> patch -> what `_here` says of it


def missed(found: Covered) -> list[tuple[str, str, str, str, str]]:
    """(patch, variant, "target" or "read", body, why) of each body that the proofs of its patch have run nowhere."""
    variants: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for patches in found.values():
        for id, said in patches.items():
            variants.setdefault((id, said["variant"]), []).append(said)
    rows = []
    for (id, variant), measured in sorted(variants.items()):
        last = measured[-1]
        for body in last["missed"]:
            if all(body in each["missed"] for each in measured):
                kind = "target" if body in last["targets"] else "read"
                rows.append((id, variant, kind, body, last["why"]))
    return rows


def table(rows: Sequence[tuple[str, str, str, str, str]]) -> str:
    """Markdown, with one line for each body and its variants together."""
    together: dict[tuple[str, str, str, str], list[str]] = {}
    for id, variant, kind, body, why in rows:
        together.setdefault((id, kind, body, why), []).append(variant)
    lines = ["| patch | variants | body | | why |", "|---|---|---|---|---|"]
    for (id, kind, body, why), variants in sorted(
        together.items(), key=lambda item: (item[0][0], item[0][1] == "read")
    ):
        named = f"`{body.partition(':')[2]}` of `{body.partition(':')[0].rpartition('.')[2]}`"
        lines.append(f"| {id} | {', '.join(variants)} | {named} | {kind} | {why} |")
    return "\n".join(lines)


def _here(ids: Sequence[str], jobs: int) -> dict[str, Any]:
    """For each patch that is to be applied to the installed releases: its variant, and what its proofs do not run."""
    import shim
    from shim._proving.reached import spots_of
    from shim._proving.run import Request, prove

    plan = shim.plan(lock=None)
    wanted = {id: d.wiring for id, d in plan.decisions.items() if d.wiring is not None and (not ids or id in ids)}
    watch = {
        id: spots_of(plan.environment.sources, {body: variant.inherits(body) or body for body in variant.bodies})
        for id, variant in wanted.items()
    }
    results = prove(plan, Request(ids=tuple(wanted), jobs=jobs, watch=watch), lambda said: None)
    found: dict[str, Any] = {}
    for id, variant in wanted.items():
        own = [result for result in results if result.patch == id]
        ran = set().union(*(result.reached for result in own))
        left = [result.reason or said.text for result in own if (said := _unable(result)) is not None]
        watched = dict.fromkeys(target for target, *_ in watch[id])
        gone = [body for body in watched if body not in ran]
        found[id] = {"variant": variant.name, "missed": gone}
        if gone:
            found[id]["targets"] = [body for body in gone if body in variant.targets]
            found[id]["why"] = left[0] if left else "no proof runs it"
    return found


def _unable(result: Any) -> Any:
    """The side that could not run, or the result itself if none was tried. None if the proof ran."""
    if result.stock is None:
        return result
    return result.stock if result.stock.state == "cannot run" else None


def _on(cell: str, ids: Sequence[str], jobs: int) -> dict[str, Any]:
    core, _, te = cell.partition("+")
    directories: list[Path] = [fetch(core), *([fetch(te, "transformer-engine")] if te else [])]
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, "--here", "--jobs", str(jobs), "--patches", ",".join(ids)],
        env=environment([*directories, PACKAGE.parent]),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"on {cell} the proofs did not run:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


def as_text(found: Covered) -> str:
    """The record as JSON with a line for each patch, so that a diff shows just what has changed."""
    cells = []
    for cell, patches in found.items():
        lines = [f"  {json.dumps(id)}: {json.dumps(said)}" for id, said in sorted(patches.items())]
        cells.append(f" {json.dumps(cell)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(cells) + "\n}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write docs/proved_coverage.json, and print the table of what no proof runs."""
    parser = argparse.ArgumentParser(prog="python -m shim.maintenance.proof_coverage", description=__doc__)
    parser.add_argument("--releases", metavar="A,B", help="only these, or pairs; what is recorded of the others stays")
    parser.add_argument("--patches", metavar="A,B", default="", help="only these; what is recorded of the others stays")
    parser.add_argument("--jobs", type=int, default=1, help="sides at once (default 1)")
    parser.add_argument("--show", action="store_true", help="print the table of the record, and measure nothing")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    ids = [id for id in options.patches.split(",") if id]
    if options.here:
        print(json.dumps(_here(ids, options.jobs)))
        return 0
    file = PACKAGE.parent / "docs" / RECORD
    for cell in [] if options.show else options.releases.split(",") if options.releases else CELLS:
        measured = _on(cell, ids, options.jobs)
        found = _read(file)  # only now: another run may have written meanwhile
        found[cell] = {**(found.get(cell, {}) if ids else {}), **measured}
        ordered = {cell: found[cell] for cell in dict.fromkeys([*CELLS, *found]) if cell in found}
        file.write_text(as_text(ordered), "utf-8")
        print(cell, f"{len(found[cell])} patches", flush=True)
    print(table(missed(_read(file))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
