"""Run the proofs on every supported release, and record what came out: `make proofs`, for developers of shim.

Each release of megatron-core runs beside a release of Transformer Engine of its time, which lends its Python layer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from packaging.version import Version

from shim._matrix.load import PACKAGE, load_matrix
from shim.testing.cells import EVERYDAY_PAIRS
from shim.testing.releases import environment, fetch

from .docs_defects import PROVED, read_proved

__all__ = ["as_text", "main", "of_its_time", "recorded"]


def of_its_time(release: str) -> str:
    """The release of Transformer Engine beside which this release of megatron-core is tested every day, or an older."""
    pairs = [pair.split("+") for pair in EVERYDAY_PAIRS]
    earlier = [te for core, te in sorted(pairs, key=lambda pair: Version(pair[0])) if Version(core) <= Version(release)]
    return earlier[-1]


def recorded(
    data: Mapping[str, Any], te: str, before: Mapping[str, Any] = MappingProxyType({}), ids: Sequence[str] = ()
) -> dict[str, Any]:
    """What is kept of the output of `shim prove --json`: words and verdicts, no seconds.

    before: what was recorded of the release earlier. It stays, but for the patches `ids`.
    """
    kept = {label: found for label, found in before.items() if label.partition("/")[0] not in ids}
    kept |= {
        label: {
            "verdict": found["verdict"],
            **{side: (found[side] or {"text": ""})["text"] for side in ("stock", "with_shim")},
        }
        for label, found in data["proofs"].items()
        if found["proof"]
    }
    return {"transformer-engine": te, "proofs": kept}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write docs/proved.json. Returns 1 if a proof has failed on some release."""
    parser = argparse.ArgumentParser(prog="python -m shim.maintenance.prove_all", description=__doc__)
    parser.add_argument("--releases", metavar="A,B", help="only these; what is recorded of the others stays")
    parser.add_argument("--patches", metavar="A,B", help="only these; what is recorded of the others stays")
    parser.add_argument("--jobs", type=int, default=2, help="sides at once (default 2)")
    options = parser.parse_args(argv)
    supported = load_matrix().supported["megatron-core"]
    docs = PACKAGE.parent / "docs"
    found = read_proved(docs)
    failed = False
    for release in options.releases.split(",") if options.releases else supported:
        te = of_its_time(release)
        ids = options.patches.split(",") if options.patches else []
        data = _prove(ids, [fetch(release), fetch(te, "transformer-engine")], options.jobs)
        before = found.get(release, {}).get("proofs", {}) if ids else {}
        found[release] = recorded(data, te, before, ids)
        failed = failed or bool(data["failed"])
        print(f"{release}+{te}: {data['summary']}", *data["failed"], flush=True)
        ordered = {release: found[release] for release in supported if release in found}
        (docs / PROVED).write_text(as_text(ordered), "utf-8")
    return 1 if failed else 0


def as_text(found: Mapping[str, Any]) -> str:
    """The record as JSON with a line for each proof, so that a diff shows just what has changed."""
    releases = []
    for release, run in found.items():
        lines = [f"   {json.dumps(label)}: {json.dumps(kept)}" for label, kept in run["proofs"].items()]
        te = json.dumps(run["transformer-engine"])
        proofs = "{\n" + ",\n".join(lines) + "\n  }"
        releases.append(f' {json.dumps(release)}: {{\n  "transformer-engine": {te},\n  "proofs": {proofs}\n }}')
    return "{\n" + ",\n".join(releases) + "\n}\n"


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
