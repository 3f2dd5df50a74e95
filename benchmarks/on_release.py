"""For the benchmarks that run on a release of megatron-core: their arguments, and the process that has the release."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TOP = str(Path(__file__).resolve().parent.parent)
SUPPORT = str(Path(TOP, "tests", "support"))  # with the trainings
# Freed memory stays with the process, as CUDA's allocator keeps it: else the fresh pages of a gradient cost as much as
# the work, and megatron-core has none for fp32, because it overwrites the logits.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 28)}


def parser_of(description: str, release: str, *, peers: bool = False, repeats: int = 0) -> argparse.ArgumentParser:
    """With --measure, which this process gives to the one that measures."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--release", default=release)
    parser.add_argument("--release-dir", help="an unpacked megatron-core of that release; default: fetched")
    if peers:
        what = "a directory with peers' packages; can be repeated"
        parser.add_argument("--peers", action="append", default=[], help=what)
    if repeats:
        parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    return parser


def cpu_name() -> str:
    """The model of this machine's CPU, as far as the system tells: times belong to it."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text("utf-8").splitlines() if cpus.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "an unknown CPU"


def peers_on_path(arguments: argparse.Namespace) -> None:
    sys.path.extend(arguments.peers)


def measured(program: str, arguments: argparse.Namespace, *settings: Mapping[str, str]) -> int:
    """Run the program with --measure on its release, once with each of these settings; the first exit code but 0."""
    sys.path.insert(0, TOP)
    from shim.testing import environment, fetch

    release = arguments.release_dir or fetch(arguments.release, progress=print)
    command = [sys.executable, program, "--measure", *sys.argv[1:]]
    for each in settings:
        given = {**os.environ, "PYTHONPATH": os.pathsep.join([TOP, SUPPORT]), "PYTHONWARNINGS": "ignore", **each}
        code = subprocess.run(command, env=environment(release, given)).returncode
        if code:
            return code
    return 0
