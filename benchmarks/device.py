"""What steps ask of a GPU, on stock and with the patches, counted on a pretended CUDA; what its kernels take of it.

    python benchmarks/device.py [--releases 0.13.1,0.16.1,0.19.2]

Writes docs/device.json, of which `make docs` makes the tables in docs/benchmarks.md. Counts have no noise, so no run is
repeated. The steps are those of tests/support/device_steps.py, the kernels those of tests/support/compiled_kernels.py.
tests/cells/test_device.py holds what the table shows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parent.parent
SUPPORT = TOP / "tests" / "support"
RESULTS = TOP / "docs" / "device.json"
RELEASES = "0.13.1,0.16.1,0.19.2"
SHOWN = ("host_reads", "blocking_copies", "launches", "bytes_moved")


def shown(run: Any) -> dict[str, int] | str:
    """The counts of a run, or its error."""
    return run.error or {name: run.counts.totals()[name] for name in SHOWN}


def measure() -> None:
    """Print the results of the release on the path, in JSON: step -> side -> counts."""
    import device_steps
    import megatron.core.models.gpt.gpt_model  # noqa: F401  what patches wait for
    import torch

    import shim
    from shim import testing

    ids = [id for id, decision in shim.plan().decisions.items() if decision.wanted]
    found: dict[str, dict[str, Any]] = {}
    with testing.Ranks(1) as one, testing.Ranks(2) as two:
        for name, step in device_steps.STEPS.items():
            ranks = {1: one, 2: two}[step.layout.world]
            stock = ranks.run(device_steps.run_counted, name, timeout=300)[0]
            patched = ranks.run(device_steps.run_counted, name, ids, timeout=300)[0]
            sides = {"stock": shown(stock), "all patches": shown(patched)}
            working = device_steps.at_work(patched, ids)
            alone = ranks.run(device_steps.each_counted, name, working, timeout=600)[0]
            sides |= {id: shown(run) for id, run in alone.items() if shown(run) != sides["stock"]}
            found[name] = sides
            print(f"{name}: {sides['stock']}, {sides['all patches']}", file=sys.stderr, flush=True)
    print(json.dumps({"torch": torch.__version__, "steps": found}))


def main() -> int:
    parser = argparse.ArgumentParser(description="What steps ask of a GPU, stock against shim, on a pretended CUDA.")
    parser.add_argument("--releases", metavar="A,B", default=RELEASES)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure()
        return 0
    sys.path.insert(0, str(TOP))
    from shim.testing import environment, fetch

    results: dict[str, Any] = {"releases": {}, "kernels": []}
    for release in arguments.releases.split(","):
        print(release, file=sys.stderr, flush=True)
        command = [sys.executable, "-W", "ignore", __file__, "--measure"]
        path = environment([fetch(release), TOP, SUPPORT])
        done = subprocess.run(command, env=path, stdout=subprocess.PIPE, text=True, check=True)
        results["releases"][release] = json.loads(done.stdout.splitlines()[-1])
    program = [sys.executable, "-W", "ignore", str(SUPPORT / "compiled_kernels.py")]
    done = subprocess.run(program, env=environment([TOP]), stdout=subprocess.PIPE, text=True, check=True)
    results["triton"] = version("triton")
    results["kernels"] = [json.loads(line) for line in done.stdout.splitlines()]
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    print(f"wrote {RESULTS.relative_to(TOP)}; make docs shows it")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
