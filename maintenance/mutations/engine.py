"""Mutate shim's own code, run the tests that run the mutated line, and list the mutants that no test notices.

    python maintenance/mutations/engine.py shim/_engine/chains.py                 all mutants of a file
    python maintenance/mutations/engine.py shim/_engine/*.py --every 5 --jobs 2   every fifth of each, two at once
    python maintenance/mutations/engine.py shim/_engine/chains.py --only 57 58    those of these lines

Works in a copy of the tree. First all tests run once under coverage, which tells the tests of each line and their
seconds. Then each mutant gets a process, which runs the tests of its lines, the quickest first, until one fails.
A test marked `no_cover`, and what a test starts in a process of its own, counts for no line: --last
tests/engine/test_state_machine.py runs such tests, too, on what has survived all others.

A survivor may live if it is equivalent, or about a message or speed. Else it needs a test, or the line may go.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

from code_mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
UNIT = ["config_override", "config_override_threads", "contracts", "lock", "match", "nesting", "options"]
UNIT += ["plan", "resume", "trust", "unreadable", "compatible", "lost_features", "per_model"]
ENGINE = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/engine/test_*.py"))
ENGINE.remove("tests/engine/test_with_torch.py")  # to import torch takes longer than most tests
TESTS = [*ENGINE, *(f"tests/unit/test_{name}.py" for name in UNIT)]
QUIET = ["-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:warnings", "--tb=no", "-W", "ignore"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every Nth mutant of each file")
    parser.add_argument("--offset", type=int, default=0, help="with --every: which one is the first")
    parser.add_argument("--only", type=int, nargs="+", metavar="LINE", help="the mutants that begin in these lines")
    parser.add_argument("--again", type=Path, metavar="JSON", help="what survived in a file that --out has written")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--last", nargs="+", default=[], metavar="TEST", help="for what survives the tests of its lines"
    )
    parser.add_argument("--seconds", type=float, default=30, help="of tests per mutant")
    parser.add_argument("--map", type=Path, help="where the tests of each line are kept, and read if the file is there")
    parser.add_argument("--out", type=Path, help="a JSON file for all outcomes")
    options = parser.parse_args()
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    _load()
    survived = None if options.again is None else _survivors(json.loads(options.again.read_text()))
    with tempfile.TemporaryDirectory() as scratch:
        copies = [_copy(Path(scratch) / "0", options.tests)]
        lines = _tests_of_lines(copies[0], options.tests, options.map)
        for number in range(1, options.jobs):
            copies.append(shutil.copytree(copies[0], Path(scratch) / str(number), ignore=lambda *_: ["tmp"]))
        chosen = []
        for file in sorted({str(Path(file).resolve().relative_to(ROOT)) for file in options.files}):
            all_of_file = mutants_of((ROOT / file).read_text("utf-8"))
            few = [m for m in all_of_file if not options.only or m.line in options.only]
            few = [m for m in few if survived is None or m.name in survived.get(file, ())]
            chosen += [(file, mutant) for mutant in few[options.offset :: options.every]]
        outcomes = _run_all(copies, chosen, lines, options.seconds, options.last)
    _report(outcomes, options.out)
    return 0


def _load() -> None:
    """What every process imports is imported once. Nothing of shim: it is read from the copies."""
    import hypothesis  # noqa: F401
    import packaging.specifiers  # noqa: F401
    import pytest  # noqa: F401
    import wrapt  # noqa: F401
    import yaml  # noqa: F401

    # The place of this tree, if it is installed from here: the copies come first on sys.path anyway.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]


def _copy(place: Path, tests: list[str]) -> Path:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    # All but what is mutated is read from byte code: to compile it takes longer than most tests.
    writing = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    writing["PYTHONPATH"] = str(place)
    for module in (["compileall", "-q", "shim"], ["pytest", *QUIET, "--collect-only", *tests]):
        subprocess.run([sys.executable, "-m", *module], cwd=place, env=writing, check=True, stdout=subprocess.DEVNULL)
    return place


# The tests of each line


def _tests_of_lines(copy: Path, tests: list[str], kept: Path | None) -> dict:
    """{"seconds": {test: seconds}, "lines": {file: {line: numbers of tests}}}"""
    if kept is None or not kept.exists():
        began, kept = time.monotonic(), kept or copy / "lines.json"
        child = _Child(lambda: _measured(copy, tests, kept), 3600)
        while not child.has_ended(1):
            pass
        found = child.result()
        if found is None or found["status"] != 0:
            sys.exit(f"the tests do not pass on the tree as it is: {found}")
        print(f"{found['tests']} tests, {time.monotonic() - began:.0f} s", flush=True)
    return json.loads(kept.read_text())


class _Times:
    """A plugin that keeps the seconds of each test, and the test that failed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: str | None = None

    def pytest_runtest_logreport(self, report) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0) + report.duration
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.failed = self.failed or f"{report.nodeid} cannot be collected"


def _measured(copy: Path, tests: list[str], kept: Path) -> dict:
    import coverage
    import pytest

    _enter(copy)
    times, data = _Times(), copy / "lines.coverage"
    (copy / "lines.toml").write_text(f'[tool.coverage.run]\nsource = ["shim"]\ndata_file = "{data}"\n')
    arguments = ["--cov", "--cov-config=lines.toml", "--cov-context=test", "--cov-report="]
    status = pytest.main([*QUIET, *arguments, "--basetemp", str(copy / "tmp"), *tests], plugins=[times])
    found = coverage.CoverageData(str(data))
    found.read()
    number_of = {test: number for number, test in enumerate(times.seconds)}
    lines = {
        str(Path(file).relative_to(copy)): {
            line: sorted({number_of[context.partition("|")[0]] for context in contexts if context})
            for line, contexts in found.contexts_by_lineno(file).items()
        }
        for file in found.measured_files()
    }
    kept.write_text(json.dumps({"seconds": times.seconds, "lines": lines}))
    return {"status": int(status), "failed": times.failed, "tests": len(number_of)}


def _enter(copy: Path) -> None:
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    sys.argv = ["pytest"]


# Mutants


def _run_all(
    copies: list[Path], chosen: list, lines: dict, seconds: float, last: list[str]
) -> list[tuple[str, Mutant, str]]:
    """(file, mutant, outcome) of each. A process per mutant, and one at a time per copy."""
    outcomes: dict[int, str] = {}
    waiting, free, running = list(enumerate(chosen)), list(copies), []
    while waiting or running:
        while waiting and free:
            number, (file, mutant) = waiting.pop(0)
            tests = _tests_for(file, mutant, lines, seconds) + [(test, 30.0) for test in last]
            if tests:
                running.append((number, _Run(free.pop(), file, mutant, tests)))
            else:
                outcomes[number] = "not run by any test"
        for number, run in list(running):
            if run.child.has_ended(0.2 / len(running)):
                running.remove((number, run))
                free.append(run.copy)
                outcomes[number] = run.outcome()
                print(f"{run.file}:{run.mutant.name} | {outcomes[number]}", flush=True)
    return [(*item, outcomes[number]) for number, item in enumerate(chosen)]


def _tests_for(file: str, mutant: Mutant, lines: dict, seconds: float) -> list[tuple[str, float]]:
    """The tests that run a mutant's lines, the quickest first, for so many seconds in all.

    Those that take as long come in a mixed order: tests of one file have much in common.
    """
    of_file, times = lines["lines"].get(file, {}), list(lines["seconds"].items())
    found = {times[n] for line in range(mutant.line, mutant.end_line + 1) for n in of_file.get(str(line), ())}
    tests: list[tuple[str, float]] = []
    for test, took in sorted(found, key=lambda item: (round(item[1], 1), crc32(item[0].encode()))):
        if tests and sum(took for _, took in tests) + took > seconds:
            break
        tests.append((test, took))
    return tests


class _Run:
    """The tests of one mutant, in a process that runs in a copy of the tree."""

    def __init__(self, copy: Path, file: str, mutant: Mutant, tests: list[tuple[str, float]]) -> None:
        self.copy, self.file, self.mutant, self.tests = copy, file, mutant, tests
        self.path = copy / file
        self.text = self.path.read_text("utf-8")
        for compiled in self.path.parent.glob(f"__pycache__/{self.path.stem}.*.pyc"):
            compiled.unlink()
        self.path.write_text(mutant.applied(self.text), "utf-8")
        seconds = 15 + 4 * sum(took for _, took in tests)
        self.child = _Child(lambda: _tested(copy, [test for test, _ in tests]), seconds)

    def outcome(self) -> str:
        self.path.write_text(self.text, "utf-8")
        result = self.child.result()
        if result is None:
            return "killed: no end, or a crash"
        if result["status"] not in (0, 1, 2):
            return f"not tried: pytest ends with {result['status']}"  # 4: --map names tests that are gone
        if result["failed"] or result["status"]:
            return f"killed by {result['failed'] or 'an interrupt'}"
        return f"SURVIVED {len(self.tests)} tests"


def _tested(copy: Path, tests: list[str]) -> dict:
    import pytest

    _enter(copy)
    times = _Times()
    status = pytest.main([*QUIET, "-x", "--basetemp", str(copy / "tmp"), *tests], plugins=[times])
    return {"status": int(status), "failed": times.failed}


class _Child:
    """A fork that runs a function, with so many seconds of a processor, and ten times as many by the clock."""

    def __init__(self, run: Callable[[], dict], seconds: float) -> None:
        self.reading, writing = os.pipe()
        self.parts: list[bytes] = []
        self.deadline = time.monotonic() + 10 * seconds
        self.pid = os.fork()
        if self.pid == 0:
            with contextlib.suppress(BaseException):
                os.setpgid(0, 0)
                resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
                nowhere = os.open(os.devnull, os.O_RDWR)
                for number in (0, 1, 2):
                    os.dup2(nowhere, number)
                with os.fdopen(writing, "w") as end:
                    end.write(json.dumps(run()))
            os._exit(0)
        os.close(writing)

    def has_ended(self, patience: float) -> bool:
        while select.select([self.reading], [], [], patience)[0]:
            part = os.read(self.reading, 1 << 16)
            if not part:
                return True
            self.parts.append(part)
        return time.monotonic() > self.deadline

    def result(self) -> dict | None:
        """What the function returned; None if it did not."""
        os.close(self.reading)
        for target in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                target(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        try:
            return json.loads(b"".join(self.parts))
        except ValueError:
            return None


def _survivors(table: dict[str, dict[str, str]]) -> dict[str, set[str]]:
    """The names of all survivors by file."""
    return {
        file: {name for name, outcome in mutants.items() if outcome.startswith("SURVIVED")}
        for file, mutants in table.items()
    }


def _report(outcomes: list[tuple[str, Mutant, str]], out: Path | None) -> None:
    if out is not None:
        table: dict[str, dict[str, str]] = {}
        for file, mutant, outcome in outcomes:
            table.setdefault(file, {})[mutant.name] = outcome
        out.write_text(json.dumps(table, indent=1) + "\n")
    print()
    for file, mutant, outcome in outcomes:
        if not outcome.startswith("killed"):
            print(f"{file}:{mutant.name} | {outcome}")
    for file in sorted({file for file, _, _ in outcomes}):
        counts = Counter(outcome.split()[0].strip(":") for name, _, outcome in outcomes if name == file)
        print(f"{file}: {counts['killed']} killed, {counts['SURVIVED']} survived, {counts['not']} not run")


if __name__ == "__main__":
    sys.exit(main())
