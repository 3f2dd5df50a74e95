"""CPU time of whole processes: what `import shim` and `shim.plan()` add to a trainer's start, as ratios.

    python benchmarks/startup.py [--release-dir DIR] [--runs N]

Each pair of programs runs alternately, each run in a fresh interpreter; user and system time of the process come from
the operating system. The first run of each, which writes byte code and fills the page cache, is not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

RELEASE = "0.19.2"
PAIRS = (
    ("import shim", "import shim", "import argparse, dataclasses", 1.5),
    ("shim.plan()", "import shim; shim.plan()", "import yaml, packaging.specifiers, importlib.metadata", 2.5),
)


def cpu_seconds(program: str, environ: Mapping[str, str]) -> float:
    """User plus system time of a fresh interpreter that runs `program`."""
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", program], environ)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"{program!r} failed")
    return usage.ru_utime + usage.ru_stime


def compare(program: str, against: str, runs: int, environ: Mapping[str, str]) -> tuple[float, float]:
    """Medians of `runs` alternating runs of both programs."""
    taken = [(cpu_seconds(program, environ), cpu_seconds(against, environ)) for _ in range(runs + 1)][1:]
    return statistics.median(mine for mine, _ in taken), statistics.median(other for _, other in taken)


def main() -> int:
    parser = argparse.ArgumentParser(description="Startup cost of shim as ratios of CPU time.")
    parser.add_argument("--release-dir", help=f"an unpacked megatron-core; default: {RELEASE}, fetched")
    parser.add_argument("--runs", type=int, default=21)
    arguments = parser.parse_args()
    release = arguments.release_dir
    if release is None:
        from shim.testing.releases import fetch

        release = str(fetch(RELEASE))
    top = str(Path(__file__).resolve().parent.parent)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([release, top])}
    missed = False
    for name, program, against, limit in PAIRS:
        mine, other = compare(program, against, arguments.runs, environ)
        ratio = mine / other
        missed |= ratio > limit
        verdict = "ok" if ratio <= limit else "MISSED"
        print(f"{name:<12} {mine * 1e3:6.1f} ms  {against:<54} {other * 1e3:6.1f} ms  ratio {ratio:4.2f}", end="")
        print(f"  (at most {limit}: {verdict})")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
