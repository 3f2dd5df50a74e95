"""CPU time of processes below `shim run` that never import megatron, against the same without it, as ratios.

    python benchmarks/workers.py [--runs N]

Both run alternately in the same run, each in a fresh interpreter; user and system time of the process come from the
operating system. The first run of each, which writes byte code and fills the page cache, is not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

PROGRAMS = (
    ("python -c pass", "pass", 1.05),
    ("a small script", "import argparse, json, logging, pathlib, subprocess; json.loads('[1]')", 1.05),
)


def cpu_seconds(program: str, environ: Mapping[str, str]) -> float:
    """User plus system time of a fresh interpreter that runs `program`."""
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", program], environ)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"{program!r} failed")
    return usage.ru_utime + usage.ru_stime


def compare(program: str, runs: int, environ: Mapping[str, str], plain: Mapping[str, str]) -> tuple[float, float]:
    """Medians of `runs` alternating runs in both environments."""
    taken = [(cpu_seconds(program, environ), cpu_seconds(program, plain)) for _ in range(runs + 1)][1:]
    return statistics.median(mine for mine, _ in taken), statistics.median(other for _, other in taken)


def main() -> int:
    parser = argparse.ArgumentParser(description="What `shim run` costs processes that never import megatron.")
    parser.add_argument("--runs", type=int, default=201)
    arguments = parser.parse_args()
    top = str(Path(__file__).resolve().parent.parent)
    sys.path.insert(0, top)
    from shim import run_environment

    # An empty directory instead of ours, so that both paths have the same length.
    plain = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parent), top])}
    environ = run_environment({**os.environ, "PYTHONPATH": top})
    missed = False
    for name, program, limit in PROGRAMS:
        mine, other = compare(program, arguments.runs, environ, plain)
        ratio = mine / other
        missed |= ratio > limit
        verdict = "ok" if ratio <= limit else "MISSED"
        print(
            f"{name:<15} {mine * 1e3:6.2f} ms below shim run  {other * 1e3:6.2f} ms plain  ratio {ratio:5.3f}", end=""
        )
        print(f"  (at most {limit}: {verdict})")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
