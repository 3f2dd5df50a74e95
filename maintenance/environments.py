"""Run the tests and proofs with each torch of the axis, and record the results: `make environments`, for developers.

Makes the environments if they are missing, some GB each. Takes about half an hour for each on two cores.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shim._matrix.load import PACKAGE, load_matrix
from shim.testing.cells import TORCH_ALONE, outcomes_of
from shim.testing.releases import cache_dir, environment, fetch

from .docs_environments import RECORD, read_record
from .other_torch import Environment, made, needs
from .proof_results import read_proved

__all__ = ["AXIS", "main", "proofs_of", "recorded_proofs", "tests_of"]

TREE = PACKAGE.parent
# The lowest torch and Python that shim supports, two between, and the newest torch that was at hand.
AXIS = (
    Environment("2.6.0", "3.10"),
    Environment("2.9.1", "3.12"),
    Environment("2.12.1", "3.13"),
    Environment("2.14.1", "3.11"),
    Environment("2.15.0", "3.11"),
)
# Python -> pairs of megatron-core and Transformer Engine; pip installs 0.17 and later on Python 3.12 and later only.
PAIRS = {
    "3.10": ("0.13.1+2.5.0", "0.16.1+2.12.0"),
    "3.11": ("0.16.1+2.12.0", "0.19.2+2.20.2"),
    "3.12": ("0.18.2+2.16.1", "0.19.2+2.20.2"),
    "3.13": ("0.16.1+2.12.0", "0.19.2+2.20.2"),
}
OF_TORCH = (
    "tests/ops",
    "tests/testing/test_torch_names.py",
    "tests/testing/test_ranks.py",
    "tests/testing/test_layout.py",
)
PYTEST = ("-q", "-p", "no:cacheprovider", "-p", "no:warnings")
VERSIONS = "import json, torch, triton, numpy; print(json.dumps([m.__version__ for m in (torch, triton, numpy)]))"


def tests_of(chosen: Environment, python: Path, jobs: int) -> dict[str, Any]:
    """The tests on torch alone, on one release, and on the same beside Transformer Engine, by the name of the cell."""
    pair = PAIRS[chosen.python][-1]
    asked = {
        TORCH_ALONE: OF_TORCH,
        pair.partition("+")[0]: ("tests/cells", "tests/examples"),
        pair: ("tests/pairs",),
    }
    found = {}
    for cell, tests in asked.items():
        logs = cache_dir() / "logs" / chosen.name
        (outcome,) = outcomes_of([cell], [*PYTEST, *tests], jobs, logs, python)
        found[cell] = {
            "tests": " ".join(tests),
            "ran": outcome.cases,
            "failed": outcome.failed,
            "result": outcome.result,
        }
    return found


def proofs_of(python: Path, pair: str, jobs: int) -> dict[str, Any]:
    """The output of `shim prove --json` on a pair of releases."""
    core, _, te = pair.partition("+")
    done = subprocess.run(
        [python, "-m", "shim", "prove", "--json", "--jobs", str(jobs)],
        env=environment([fetch(core), fetch(te, "transformer-engine"), TREE]),
        capture_output=True,
        text=True,
    )
    if not done.stdout:
        raise SystemExit(f"shim prove has printed nothing:\n{done.stderr}")
    return json.loads(done.stdout)


def recorded_proofs(data: Mapping[str, Any], usual: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Verdicts by their number, reasons, failures, and the words of stock that differ from `usual`.

    usual: what is recorded of the release, with torch 2.13.
    """
    proofs = {label: found for label, found in data["proofs"].items() if found["proof"]}
    here = {label: (found["stock"] or {"text": ""})["text"] for label, found in proofs.items()}
    differ = {
        label: text
        for label, text in here.items()
        if text
        and label in usual
        and proofs[label]["verdict"] != "cannot run"
        and _words(text) != _words(usual[label]["stock"])
    }
    reasons = Counter(found["reason"] for found in proofs.values() if found["verdict"] == "cannot run")
    return {
        "verdicts": dict(sorted(Counter(found["verdict"] for found in proofs.values()).items())),
        "cannot run": dict(sorted(reasons.items())),
        "failed": sorted(data["failed"]),
        "differ": differ,
    }


def _words(text: str) -> str:
    """A text without its numbers, which vary a little with the machine."""
    return re.sub(r"\d[\d.e+-]*|\b(nan|inf)\b", "#", text)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write docs/environments.json. Returns 1 if a test or a proof has failed."""
    parser = argparse.ArgumentParser(prog="python -m shim.maintenance.environments", description=__doc__)
    parser.add_argument("--torch", metavar="A,B", help="only these of the axis; what is recorded of the others stays")
    parser.add_argument("--only", choices=("tests", "proofs"), help="what is recorded of the other stays")
    parser.add_argument("--jobs", type=int, default=2, help="sides of proofs at once (default 2)")
    options = parser.parse_args(argv)
    docs = TREE / "docs"
    record, usual = read_record(docs), read_proved(load_matrix())
    failed = False
    for chosen in AXIS:
        if options.torch and chosen.torch not in options.torch.split(","):
            continue
        python = made(chosen, needs(TREE / "tests" / "requirements.txt"))
        said = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout
        _, triton, numpy = json.loads(said)
        row = record.setdefault(chosen.torch, {"tests": {}, "proofs": {}})
        row |= {"python": chosen.python, "triton": triton, "numpy": numpy}
        if options.only != "proofs":
            row["tests"] = tests_of(chosen, python, options.jobs)
        for pair in PAIRS[chosen.python] if options.only != "tests" else ():
            data = proofs_of(python, pair, options.jobs)
            row["proofs"][pair] = recorded_proofs(data, usual[pair.partition("+")[0]]["proofs"])
            print(f"{chosen}, {pair}: {data['summary']}", *data["failed"], flush=True)
        failed = failed or _has_failed(row)
        _write(docs, record)
    return 1 if failed else 0


def _has_failed(row: Mapping[str, Any]) -> bool:
    return any(found["result"] != "passed" for found in row["tests"].values()) or any(
        found["failed"] for found in row["proofs"].values()
    )


def _write(docs: Path, record: Mapping[str, Any]) -> None:
    ordered = {chosen.torch: record[chosen.torch] for chosen in AXIS if chosen.torch in record}
    (docs / RECORD).write_text(json.dumps(ordered, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
