"""Run the proofs on every supported release, and record what came out: `make proofs`, for developers of shim.

Each release of megatron-core runs beside a release of Transformer Engine of its time, which lends its Python layer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from shim._matrix.load import PACKAGE, load_matrix
from shim._matrix.model import Matrix
from shim.testing.cells import EVERYDAY_PAIRS
from shim.testing.releases import environment, fetch

from .proof_results import as_text, read_results, recorded, results_path

__all__ = ["main", "of_its_time", "prove_on"]


def of_its_time(release: str) -> str:
    """The release of Transformer Engine beside which this release of megatron-core is tested every day, or an older.

    Beside a release before all of them, such as 0.11 of a commit, it is that of the first.
    """
    pairs = sorted((pair.split("+") for pair in EVERYDAY_PAIRS), key=lambda pair: Version(pair[0]))
    at = max(Version(release), Version(pairs[0][0]))
    return next(te for core, te in reversed(pairs) if Version(core) <= at)


def prove_on(matrix: Matrix, release: str, ids: Iterable[str] = (), jobs: int = 2) -> bool:
    """Run the proofs of these patches, or of all, on a release, and write what came out. Returns whether one failed."""
    te = of_its_time(release)
    data = _prove(list(ids), [fetch(release), fetch(te, "transformer-engine")], jobs)
    found: dict[str, dict[str, Any]] = {}
    for label, said in data["proofs"].items():
        found.setdefault(label.partition("/")[0], {})[label] = said
    for id, proofs in found.items():
        entry = matrix.patches[id]
        results = recorded(proofs, f"{release}+{te}", read_results(entry))
        if results:
            results_path(entry).write_text(as_text(results), "utf-8")
    print(f"{release}+{te}: {data['summary']}", *data["failed"], flush=True)
    return bool(data["failed"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write proved.json of each patch. Returns 1 if a proof has failed on some release."""
    parser = argparse.ArgumentParser(prog="python -m shim.maintenance.prove_all", description=__doc__)
    parser.add_argument("--releases", metavar="A,B", help="only these; what is recorded of the others stays")
    parser.add_argument("--patches", metavar="A,B", help="only these; what is recorded of the others stays")
    parser.add_argument("--jobs", type=int, default=2, help="sides at once (default 2)")
    options = parser.parse_args(argv)
    matrix = load_matrix()
    releases = options.releases.split(",") if options.releases else matrix.supported["megatron-core"]
    ids = options.patches.split(",") if options.patches else []
    failed = [prove_on(matrix, release, ids, options.jobs) for release in releases]
    return 1 if any(failed) else 0


def _prove(ids: Sequence[str], directories: Sequence[Path], jobs: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "shim", "prove", *ids, "--json", "--jobs", str(jobs)],
        env=environment([*directories, PACKAGE.parent]),
        capture_output=True,
        text=True,
    )
    if not done.stdout:
        raise SystemExit(f"shim prove has printed nothing:\n{done.stderr}")
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
