"""The steps of gpu/run.sh: what runs, in which order and for how long, and how its results are kept.

Results are written as they come, so that a call that is cut keeps what it has: log.txt has the output of all steps,
line by line, each with the name of its step; results.jsonl has one line for the machine and one for each step, with
what was read in its output. report.py reads the log once more, and takes nothing that is not in it.
Tests and proofs run side by side, benchmarks alone. --dry runs the same steps without a GPU (see dry.py).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent
TOP = HERE.parent
BUNDLE = HERE / "bundle"
PAIRS = ("0.16.1+2.11.0", "0.19.2+2.20.2")
WORD = r"(PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)"
OUTCOME = re.compile(rf"^(?:\[gw\d+\] +\[ *\d+%\] {WORD} (\S.*?)\s*$|(\S+::\S.*?) {WORD}\b)")
BESIDE = "!"  # behind the name of a step: what it has written to stderr, which is not read
LEAST = 5.0  # seconds that are left to start a step
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
CUT = 128 + signal.SIGTERM
FEW = ("te-fp8-state", "rope-thd")  # patches whose proofs a dry run tries
SLOWER = 4  # a dry run shares two cores
LOADED = """
import torch, transformer_engine.pytorch, transformer_engine_torch
from importlib.metadata import version
from megatron.core.extensions import transformer_engine
print("transformer-engine", version("transformer-engine"), "is loaded;", transformer_engine_torch.__file__)
"""


@dataclass
class Step:
    """kind: "tests", "proofs" or "text", which says how the output is read. pair: its directory is on the path; "" for
    none. alone: nothing runs beside it, because it is timed."""

    name: str
    kind: str
    command: Sequence[str]
    seconds: float
    pair: str = ""
    alone: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}, {self.pair}" if self.pair else self.name


def steps(dry: bool) -> list[Step]:
    """In the order of their value: what comes last is what a short call leaves out.

    dry: without a GPU tests run with dry.py, a few proofs on the CPU, and benchmarks say that there is no GPU.
    """
    python = sys.executable
    models = [f"{model}{recipe}" for recipe in ("", "_fp8") for model in ("dense", "multi_token", "experts", "latent")]
    tests = [python, "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", "-m", "gpu"]
    tests += ["-p", "dry"] if dry else ["-n", "4"]
    prove = [python, "-m", "shim", "prove", "--json", "--device", "cpu" if dry else "cuda"]
    found = [Step("extension", "text", [python, "-c", LOADED], 60, pair) for pair in PAIRS]
    found += [Step("tests/gpu", "tests", [*tests, "tests/gpu"], 200, pair) for pair in PAIRS]
    found += [Step("prove", "proofs", [*prove, "--jobs", "4", *(FEW if dry else ())], 200, pair) for pair in PAIRS]
    logprob = [python, "benchmarks/logprob.py", "--measure", "--gpu", "--release", PAIRS[1].partition("+")[0]]
    found.append(Step("log-probabilities", "text", logprob, 70, PAIRS[1], True))
    found += [
        Step(f"prove {model}", "proofs", [*prove, "--jobs", "2", "--model", f"te_models:{model}"], 100, pair)
        for model in models
        for pair in PAIRS
    ]
    of_release = {pair: [python, "benchmarks/gpu_steps.py", "--measure", "--release", pair] for pair in PAIRS}
    found += [Step("steps", "text", [*of_release[pair], "--te"], 60, pair, True) for pair in reversed(PAIRS)]
    stash = [python, "benchmarks/paged_stash.py", "--measure", "cuda"]
    found.append(Step("paged stash", "text", stash, 40, PAIRS[1], True))
    cross_entropy = [python, "benchmarks/te_cross_entropy.py", "--tree", f"{{site {PAIRS[1]}}}"]
    found.append(Step("cross entropy", "text", [*cross_entropy, *["--cpu"] * dry], 40, PAIRS[1], True))
    sleep = [python, "benchmarks/sleep.py", "--measure", "--release", PAIRS[1].partition("+")[0]]
    found.append(Step("sleep", "text", sleep, 45, PAIRS[1], True))
    found += [Step("steps without TE", "text", of_release[pair], 60, pair, True) for pair in reversed(PAIRS)]
    return found


# What a step says


def read_tests(text: str) -> dict[str, Any]:
    """Of pytest -v -rs, also if it was cut: how many tests had each outcome, what failed, why some were skipped."""
    outcomes: dict[str, str] = {}
    for line in text.splitlines():
        if found := OUTCOME.match(line):
            outcomes[found[2] or found[3]] = found[1] or found[4]
    skipped = re.findall(r"^SKIPPED \[\d+\] (\S+: .*)$", text, re.MULTILINE)
    return {
        "counts": dict(Counter(outcome.lower() for outcome in outcomes.values())),
        "passed": sorted(name for name, outcome in outcomes.items() if outcome == "PASSED"),
        "failed": sorted(name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")),
        "skipped": skipped,
    }


def read_proofs(text: str) -> dict[str, Any]:
    """Of shim prove --json: how many proofs have each verdict, and the words of those that are not right."""
    try:
        found = json.loads(text)
    except ValueError:
        return {"counts": {}}
    proofs: dict[str, Any] = found.get("proofs") or {}
    said = {name: (each.get("with_shim") or each.get("stock") or {}).get("text", "") for name, each in proofs.items()}
    return {
        "counts": dict(Counter(each["verdict"] for each in proofs.values())),
        "proofs": {name: [each["verdict"], each.get("reason") or said[name]] for name, each in proofs.items()},
        "failed": found.get("failed", []),
    }


def said_in(log: str, label: str) -> str:
    """The output of a step, from the log of all."""
    head = f"[{label}] "
    return "".join(f"{line.removeprefix(head)}\n" for line in log.splitlines() if line.startswith(head))


READERS = {"tests": read_tests, "proofs": read_proofs, "text": lambda text: {"text": text}}


# Running


class Run:
    """The steps that run now, and the two files. Lines and results are written under one lock."""

    def __init__(self, out: Path, work: Path, deadline: float, dry: bool) -> None:
        self.out, self.work, self.deadline, self.dry = out, work, deadline, dry
        self.lock, self.freed = threading.Lock(), threading.Condition()
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.cut = False
        self.bad: list[str] = []
        out.mkdir(parents=True, exist_ok=True)
        self.log: TextIO = (out / "log.txt").open("w", encoding="utf-8")
        self.results: TextIO = (out / "results.jsonl").open("w", encoding="utf-8")

    def say(self, name: str, line: str) -> None:
        line = line.rstrip("\n")
        with self.lock:
            self.log.write(f"[{name}] {line}\n")
            self.log.flush()

    def result(self, **found: Any) -> None:
        with self.lock:
            self.results.write(json.dumps(found) + "\n")
            self.results.flush()
            shown = " ".join(f"{count} {what}" for what, count in found.get("counts", {}).items())
            status = f", exit status {found['code']}" if found.get("code") else ""
            print(f"{found['step']}: {found['state']}{status} {shown}".rstrip(), flush=True)
            for name in found.get("failed", [])[:10]:
                print(f"    {name}", flush=True)

    def run(self, step: Step) -> None:
        """Run it to its end or its limit, and keep what it has said."""
        began = time.monotonic()
        left = self.deadline - began
        limit = min(step.seconds * (SLOWER if self.dry else 1), left)
        site = self.work / step.pair if step.pair else None
        problem = "" if site is None or site.is_dir() else f"no gpu/bundle/{step.pair}.tar.xz: make gpu-bundle"
        if not problem and left < LEAST:
            problem = "no time left"
        if problem:
            self.result(step=step.label, state="not run", why=problem, dry=self.dry)
            self.bad.append(step.label)
            return
        command = [part.replace(f"{{site {step.pair}}}", str(site)) for part in step.command]
        process = subprocess.Popen(
            command,
            cwd=TOP,
            env=environment(self.work, step, self.dry),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if step.kind == "proofs" else subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        with self.freed:
            self.running[step.label] = process
        timer = threading.Timer(limit, stop, [process])
        timer.start()
        beside = threading.Thread(target=self._progress, args=(step, process.stderr)) if process.stderr else None
        if beside:
            beside.start()
        said = []
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            self.say(step.label, line)
        code = process.wait()
        if beside:
            beside.join()
        timer.cancel()
        seconds = time.monotonic() - began
        state = "ended" if seconds < limit else "over its limit"
        state = "cut" if self.cut else state
        found = READERS[step.kind]("".join(said))
        good = state == "ended" and code == 0 and not found.get("failed")
        if self.dry and step.kind == "proofs":  # that they cannot run here is what is expected
            good = bool(found["counts"])
        about = {"step": step.label, "name": step.name, "pair": step.pair, "kind": step.kind, "alone": step.alone}
        self.result(**about, state=state, code=code, seconds=round(seconds, 1), dry=self.dry, **found)
        with self.freed:
            if not good:
                self.bad.append(step.label)
            del self.running[step.label]
            self.freed.notify_all()

    def _progress(self, step: Step, lines: TextIO) -> None:
        for line in lines:
            self.say(f"{step.label}{BESIDE}", line.rpartition("\r")[2])

    def all(self, chosen: Sequence[Step], jobs: int) -> None:
        """Start each step in its turn: up to `jobs` at once, and one that runs alone when all others have ended."""
        threads = []
        for step in chosen:
            with self.freed:
                most = 0 if step.alone else jobs - 1
                self.freed.wait_for(lambda most=most: len(self.running) <= most)
            if self.cut:
                break
            thread = threading.Thread(target=self.run, args=(step,))
            thread.start()
            threads.append(thread)
            while thread.is_alive() and step.label not in self.running:
                time.sleep(0.01)
            if step.alone:
                thread.join()
        for thread in threads:
            thread.join()

    def stop_all(self, *_: Any) -> None:
        self.cut = True
        for process in list(self.running.values()):
            stop(process)


def stop(process: subprocess.Popen[str]) -> None:
    """End a step with all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    late = threading.Timer(GRACE, kill)
    late.daemon = True
    late.start()


def environment(work: Path, step: Step, dry: bool) -> dict[str, str]:
    """What is carried comes before what the machine has. Without CUDA in the system, its libraries are torch's."""
    site = Path(next((path for path in sys.path if (Path(path) / "nvidia").is_dir()), sys.prefix))
    libraries = [str(path) for path in sorted(site.glob("nvidia/*/lib"))]
    path = [str(work / step.pair)] if step.pair else []
    path += [str(work / "packages"), str(TOP), str(TOP / "tests" / "support"), str(TOP / "benchmarks")]
    path += [str(HERE)] if dry else []
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "LD_LIBRARY_PATH": os.pathsep.join([*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]),
        "OMP_NUM_THREADS": "1" if dry else "2",
        "PYTHONWARNINGS": "ignore",
        "MEGATRON_SHIM_CACHE": str(work / "cache"),
        "TRITON_CACHE_DIR": str(work / "triton"),
    }


# The machine


MACHINE = """
import json, torch, triton
there = torch.cuda.is_available()
print(json.dumps({
    "gpu": torch.cuda.get_device_name() if there else "",
    "capability": list(torch.cuda.get_device_capability()) if there else [],
    "torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__,
}))
"""


def machine() -> dict[str, Any]:
    """Asked in another process, so that this one keeps no memory of the GPU. `tree` tells which sources these are."""
    done = subprocess.run([sys.executable, "-c", MACHINE], capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or ["{}"])[-1]
    found = json.loads(last) if done.returncode == 0 else {"gpu": "", "torch": "", "error": done.stderr[-300:]}
    return {**found, "python": platform.python_version(), "cpus": os.cpu_count(), "tree": tree_digest()}


def tree_digest(top: Path = TOP) -> str:
    """Of all that is tested and measured here, and of what does it."""
    digest = hashlib.sha256()
    rooms = ("shim", "patches", "benchmarks", "tests/gpu", "tests/support", "gpu")
    files = [file for room in rooms for file in (top / room).rglob("*") if file.suffix in (".py", ".yaml", ".sh")]
    for file in sorted(file for file in files if not {"bundle", "out"} & set(file.relative_to(top).parts[1:2])):
        digest.update(f"{file.relative_to(top).as_posix()}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def unpacked(work: Path, run: Run) -> None:
    """The archives of gpu/bundle, side by side: each is a directory for PYTHONPATH."""

    def unpack(archive: Path) -> None:
        began = time.monotonic()
        name = archive.name.removesuffix(".tar.xz")
        target = work / name
        try:
            with tarfile.open(archive) as packed:
                packed.extractall(target, filter="data")
        except (tarfile.TarError, OSError, EOFError) as error:
            run.say("unpack", f"{name}: {error}")
            if target.is_dir():
                target.rename(work / f"{name}.incomplete")
        else:
            run.say("unpack", f"{name}: {time.monotonic() - began:.0f} s")

    threads = [threading.Thread(target=unpack, args=(archive,)) for archive in sorted(BUNDLE.glob("*.tar.xz"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shim-gpu-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run what needs a GPU, and keep each result as it comes.")
    parser.add_argument("--out", type=Path, required=True, help="where log.txt and results.jsonl go")
    parser.add_argument("--seconds", type=float, help="for everything; steps that are late are left out; default 450")
    parser.add_argument("--jobs", type=int, default=8, help="steps at once, of those that are not timed")
    parser.add_argument("--only", action="append", default=[], help="steps with this word in their names")
    parser.add_argument("--dry", action="store_true", help="without a GPU: every step, but for its kernels")
    arguments = parser.parse_args()
    began = time.monotonic()
    seconds = arguments.seconds or 450 * (SLOWER if arguments.dry else 1)
    with workplace() as work:
        run = Run(arguments.out, work, began + seconds, arguments.dry)
        signal.signal(signal.SIGTERM, run.stop_all)
        signal.signal(signal.SIGINT, run.stop_all)
        here = machine()
        run.result(step="machine", state=here["gpu"] or "no GPU", dry=arguments.dry, **here)
        if not here["gpu"] and not arguments.dry:
            print("No GPU: nothing was run. --dry runs the steps without one.")
            return 1
        unpacked(work, run)
        chosen = [step for step in steps(arguments.dry) if all(word in step.label for word in arguments.only)]
        run.all(chosen, arguments.jobs)
        print(f"{time.monotonic() - began:.0f} s; {len(run.bad)} of {len(chosen)} steps did not end well")
    return CUT if run.cut else int(bool(run.bad))


if __name__ == "__main__":
    raise SystemExit(main())
