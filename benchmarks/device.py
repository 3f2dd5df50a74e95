"""What steps ask of a GPU, on stock and with the patches, counted on a pretended CUDA; what its kernels take of it.

    python benchmarks/device.py [--releases 0.16.1,0.19.2]

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
RELEASES = "0.19.2"
SHOWN = ("host_reads", "blocking_copies", "launches", "bytes_moved")


def shown(run: Any) -> dict[str, int] | str:
    """The counts of a run, or its error."""
    return run.error or {name: run.counts.totals()[name] for name in SHOWN}


def measure(chosen: str) -> None:
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
            if chosen and name != chosen:
                continue
            ranks = {1: one, 2: two}[step.layout.world]
            stock = ranks.run(device_steps.run_counted, name, timeout=300)[0]
            patched = ranks.run(device_steps.run_counted, name, ids, timeout=300)[0]
            sides = {"stock": shown(stock), "all patches": shown(patched)}
            # One patch is not all that a step of two ranks may need: a rank that fails would leave the other waiting.
            working = [] if stock.error and step.layout.world > 1 else device_steps.at_work(patched, ids)
            alone = ranks.run(device_steps.each_counted, name, working, timeout=600)[0]
            sides |= {id: shown(run) for id, run in alone.items() if shown(run) != sides["stock"]}
            found[name] = sides
            print(f"{name}: {sides['stock']}, {sides['all patches']}", file=sys.stderr, flush=True)
    print(json.dumps({"torch": torch.__version__, "steps": found}))


def of_kernels(path: dict[str, str]) -> dict[str, Any]:
    """What the kernels take, and the Triton that has compiled them."""
    program = [sys.executable, "-W", "ignore", str(SUPPORT / "compiled_kernels.py")]
    done = subprocess.run(program, env=path, stdout=subprocess.PIPE, text=True, check=True)
    return {"triton": version("triton"), "kernels": [json.loads(line) for line in done.stdout.splitlines()]}


def main() -> int:
    parser = argparse.ArgumentParser(description="What steps ask of a GPU, stock against shim, on a pretended CUDA.")
    parser.add_argument("--releases", metavar="A,B", default=RELEASES)
    parser.add_argument("--step", default="", help="this step only; the other results stay, and those of kernels too")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.step)
        return 0
    sys.path.insert(0, str(TOP))
    from shim.testing import environment, fetch

    old: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if arguments.step else {}
    releases: dict[str, Any] = {}
    for release in arguments.releases.split(","):
        print(release, file=sys.stderr, flush=True)
        command = [sys.executable, "-W", "ignore", __file__, "--measure", "--step", arguments.step]
        path = environment([fetch(release), TOP, SUPPORT])
        done = subprocess.run(command, env=path, stdout=subprocess.PIPE, text=True, check=True)
        releases[release] = json.loads(done.stdout.splitlines()[-1])
        if old:
            releases[release]["steps"] = old["releases"][release]["steps"] | releases[release]["steps"]
    kernels = {"triton": old["triton"], "kernels": old["kernels"]} if old else of_kernels(environment([TOP]))
    RESULTS.write_text(json.dumps({"releases": releases, **kernels}, indent=1) + "\n", "utf-8")
    print(f"wrote {RESULTS.relative_to(TOP)}; make docs shows it")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
