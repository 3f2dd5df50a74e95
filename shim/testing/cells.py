"""Test cells: the same pytest run on one release after another, each in a separate process.

The name of a cell says what it runs on: "0.15.3" is a release of megatron-core, "0.15.3+2.9.0" adds a TE release (its
Python sources, see `transformer_engine_on_cpu`), "+2.9.0" is a TE release alone. A commit of the matrix takes the
place of a release: "d98e8a64dd", "d98e8a64dd+2.20.2". "torch" is a cell with neither, for tests that need torch alone.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from shim._errors import MatrixError
from shim._matrix.cells import cells as distinct_cells
from shim._matrix.declared import MAIN as _MAIN
from shim._matrix.load import load_matrix
from shim._matrix.model import Matrix

from .releases import RELEASES, FetchError, at_hand, cache_dir, environment, fetch

__all__ = ["ALL_PAIRS", "EVERYDAY", "EVERYDAY_PAIRS", "MAIN", "run_cells"]


def _matrix() -> Matrix:
    """With the pins, by which releases are distinct; without them if they do not fit the rules, for `shim pin`."""
    with contextlib.suppress(MatrixError):
        return load_matrix()
    return load_matrix(pins=False)


_MATRIX = _matrix()
# One release for each distinct set of target bodies.
EVERYDAY = tuple(cell["megatron-core"] for cell in distinct_cells(_MATRIX))
# The newest commit of the main branch, which stands for the next release. "" if the matrix has none.
MAIN = next((c.name for c in reversed([*_MATRIX.commits.get("megatron-core", {}).values()]) if c.branch == _MAIN), "")

EVERYDAY_PAIRS = (
    "0.12.0+2.2.0",
    "0.12.0+2.3.0",
    "0.12.3+2.1.0",
    "0.13.1+2.5.0",
    "0.15.3+2.9.0",
    "0.16.1+2.12.0",
    "0.17.1+2.15.0",
    "0.17.1+2.14.1",
    "0.18.2+2.16.1",
    "0.18.2+2.18.0",
    "0.19.2+2.20.2",
)

# The TE releases just before and just after each of its moves.
_TE_TURNS = (
    "2.1.0",
    "2.2.0",
    "2.3.0",
    "2.7.0",
    "2.8.0",
    "2.9.0",
    "2.10.0",
    "2.12.0",
    "2.15.0",
    "2.16.1",
    "2.18.0",
    "2.19.0",
    "2.20.2",
)
_IN_USE = ("0.16.0+2.16.1", "0.17.1+2.14.1", "0.18.0+2.16.1", "0.19.0+2.16.0")
ALL_PAIRS = tuple(
    dict.fromkeys([*(f"{release}+{te}" for release in EVERYDAY for te in _TE_TURNS), *EVERYDAY_PAIRS, *_IN_USE])
)

TORCH_ALONE = "torch"  # the name of a cell without releases

_TAIL = 40  # lines of a failing cell's log that are printed
_COLUMNS = "240"  # of pytest's output: in 80, its summary has no place for the reasons
_NO_TESTS = 5  # pytest's exit status when it ran none


@dataclass(frozen=True)
class Outcome:
    """What pytest did on a cell. result: "passed", "failed", "no test ran" or "not fetched"."""

    cell: str
    result: str
    cases: int
    seconds: float
    log: Path
    failed: int = 0

    def __str__(self) -> str:
        return f"{self.cell:<14} {self.result:<12} {self.cases:4d} cases  {self.seconds:6.1f} s"


def run_cells(
    cells: Sequence[str],
    pytest_args: Sequence[str],
    jobs: int = 2,
    log_dir: Path | None = None,
    python: Path | None = None,
) -> int:
    """Run `pytest <pytest_args>` once per cell, `jobs` at a time, and print one line per cell as it ends.

    A cell is "0.15.3" (megatron-core), "0.15.3+2.9.0" (with Transformer Engine), "+2.9.0" (that alone) or "torch" (none
    of them). `python`: the interpreter of another environment, by default this one.
    Output goes to <log_dir>/<cell>.log (by default below the cache). Of a failing cell's log, what pytest says of the
    failures is printed. Returns 0 when every cell passed, 1 when one failed, could not be fetched, or ran no test. A
    cell whose tests were all skipped ran none.
    """
    outcomes = outcomes_of(cells, pytest_args, jobs, log_dir, python)
    return 0 if outcomes and all(outcome.result == "passed" for outcome in outcomes) else 1


def outcomes_of(
    cells: Sequence[str],
    pytest_args: Sequence[str],
    jobs: int = 2,
    log_dir: Path | None = None,
    python: Path | None = None,
) -> list[Outcome]:
    """As `run_cells`, with the outcome of each cell as it ended."""
    logs = log_dir if log_dir is not None else cache_dir() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    ended = []
    # The longest first, so that none of them is left to run alone; new releases have more to test.
    before = {cell: (_seconds(logs / f"{cell}.log"), place) for place, cell in enumerate(cells)}
    cells = sorted(before, key=before.__getitem__, reverse=True)
    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        running = [pool.submit(_run_cell, cell, pytest_args, logs / f"{cell}.log", python) for cell in cells]
        for done in as_completed(running):
            ended.append(done.result())
            print(ended[-1], flush=True)
    for outcome in [outcome for outcome in ended if outcome.result != "passed"]:
        print(f"\n---- {outcome.cell}: {outcome.result}; all of it in {outcome.log}")
        print("\n".join(_failures(outcome.log.read_text(errors="replace"))), flush=True)
    return ended


def with_main(cells: Sequence[str]) -> list[str]:
    """`cells`, and the same of the main branch: alone, or with each TE release in `cells`.

    If the sources of the commit are missing, a line says so. No repository is downloaded by accident.
    """
    if not MAIN or not at_hand(MAIN):
        missing = f"{MAIN} (set SHIM_MEGATRON_GIT, or fetch it)" if MAIN else "no commit of the main branch is pinned"
        print(f"without the main branch of megatron-core: {missing}", flush=True)
        return list(cells)
    return [*cells, *dict.fromkeys(MAIN + cell[cell.find("+") :] if "+" in cell else MAIN for cell in cells)]


def _fetch(cell: str) -> list[Path]:
    """The directories of the releases that a cell runs on."""
    if cell == TORCH_ALONE:
        return []
    core, _, te = cell.partition("+")
    found = [fetch(core)] if core else []
    return [*found, fetch(te, "transformer-engine")] if te else found


def _run_cell(cell: str, pytest_args: Sequence[str], log: Path, python: Path | None) -> Outcome:
    started = time.monotonic()
    try:
        directories = _fetch(cell)
    except FetchError as error:
        log.write_text(f"{error}\n")
        return Outcome(cell, "not fetched", 0, time.monotonic() - started, log)
    tree = source_tree() if python is not None else None  # shim is in no other environment
    with log.open("w") as output:
        done = subprocess.run(
            [python or sys.executable, "-m", "pytest", *pytest_args],
            env={**environment([*directories, *([tree] if tree else [])]), "COLUMNS": _COLUMNS},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    said = log.read_text(errors="replace")
    cases, failed = _cases(said), _cases(said, "failed|errors?")
    result = "passed" if done.returncode == 0 else "failed"
    if done.returncode == _NO_TESTS or (done.returncode == 0 and cases == 0):
        result = "no test ran"
    return Outcome(cell, result, cases, time.monotonic() - started, log, failed)


def _failures(output: str) -> list[str]:
    """The end of what pytest says of failures, with its summary; no warnings, nothing that libraries say at exit."""
    lines = output.splitlines()
    last = next((place for place, line in enumerate(lines, 1) if line and line == _summary(output)), len(lines))
    heads = [place for place, line in enumerate(lines[:last]) if re.fullmatch(r"=+ .+ =+", line)]
    parts = [lines[start:end] for start, end in zip([0, *heads], [*heads, last])]
    return [line for part in parts if not (part and " warnings summary " in part[0]) for line in part][-_TAIL:]


def _summary(output: str) -> str:
    """The last line that pytest prints: "3 passed, 1 skipped in 0.52s"."""
    return next((line for line in reversed(output.splitlines()) if re.search(r" in [\d.]+s", line)), "")


def _cases(output: str, kinds: str = "passed|failed|errors?|xfailed|xpassed") -> int:
    """Tests that ran, by pytest's own summary."""
    counts = re.findall(rf"(\d+) (?:{kinds})\b", _summary(output))
    return sum(int(count) for count in counts)


def _seconds(log: Path) -> float:
    """How long a cell took the last time; 0 if it never ran."""
    found = re.search(r" in ([\d.]+)s", _summary(log.read_text(errors="replace"))) if log.exists() else None
    return float(found[1]) if found else 0.0


def source_tree() -> Path | None:
    """The tree that shim is imported from; None if that is an installation."""
    tree = Path(__file__).parents[2]
    return tree if (tree / "pyproject.toml").is_file() and (tree / "patches").is_dir() else None


def main(argv: Sequence[str] | None = None, python: Path | None = None) -> int:
    """python -m shim.testing.cells [--releases A,B | --all | --everyday | --all-pairs | ...] -- <pytest args>

    python: the interpreter of another environment.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    own, pytest_args = arguments, []
    if "--" in arguments:
        split = arguments.index("--")
        own, pytest_args = arguments[:split], arguments[split + 1 :]
    parser = argparse.ArgumentParser(prog="python -m shim.testing.cells", description=__doc__)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--releases", metavar="A,B", help="these cells: 0.15.3, 0.15.3+2.9.0, +2.9.0, d98e8a64dd")
    chosen.add_argument("--all", action="store_true", help="every supported release, and main if it is available")
    chosen.add_argument("--everyday", action="store_true", help="one release per set of bodies (the default)")
    chosen.add_argument("--all-pairs", action="store_true", help="with Transformer Engine, around each of its turns")
    chosen.add_argument("--everyday-pairs", action="store_true", help="with Transformer Engine, a few pairs")
    parser.add_argument("--jobs", type=int, default=2, help="cells at once (default 2)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="the directory for logs")
    options = parser.parse_args(own)
    try:
        load_matrix()
    except MatrixError as error:  # of every cell
        print(error, flush=True)
        return 1
    cells: Sequence[str] = EVERYDAY
    if options.all:
        cells = with_main(RELEASES)
    elif options.all_pairs:
        cells = with_main(ALL_PAIRS)
    elif options.everyday_pairs:
        cells = EVERYDAY_PAIRS
    elif options.releases:
        cells = [cell.strip() for cell in options.releases.split(",")]
    return run_cells(cells, pytest_args, options.jobs, options.logs, python)


if __name__ == "__main__":
    sys.exit(main())
