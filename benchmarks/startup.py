"""A trainer's start with shim against the imports alone: whole processes, and the files that apply() opens.

    python benchmarks/startup.py [--releases 0.16.1,0.19.2] [--patches 420] [--runs N] [--record]

Each program runs in a fresh interpreter, with shim from its wheel, or from a copy of the checkout if there are to be
more patches. Valgrind counts the instructions that the process executes in user space, in one to two minutes. The count
repeats to a thousandth on any host; so limits hold for it, and it is what --record keeps. It sees neither the kernel
nor cache misses, and half a percent too much of shim: valgrind hides the instructions that a processor has for SHA-256.

--runs N also prints CPU time, user and system: the median over N rounds of the ratio within a round. On a shared host
one ratio can be off by a third.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shim._matrix.load import load_matrix

RELEASES = ("0.14.0", "0.16.1", "0.18.2", "0.19.2")
TOP = Path(__file__).resolve().parent.parent
RESULTS = TOP / "docs" / "startup.json"
IMPORTS = "import torch, megatron.core.models.gpt.gpt_model"
RUN = TOP / "shim" / "_workers" / "run"  # what `shim run` puts on PYTHONPATH
LIMIT, LIMIT_OF_MORE = 1.05, 1.1
MOST_OPENS = 150
WAYS = (  # what a process does, and the program
    ("apply() before the imports", f"import shim; shim.apply(); {IMPORTS}"),
    ("apply() after them", f"{IMPORTS}; import shim; shim.apply()"),
    ("under shim run", IMPORTS),
)
PATCHES = 4 * 105
OPENS = """
import os, sys
opened = []
sys.addaudithook(lambda event, told: event == "open" and isinstance(told[0], str) and opened.append(told[0]))
import shim
shim.apply()
found = [name for name in opened if os.path.isfile(name)]
print(len(found), sum(map(os.path.getsize, found)))
"""

MADE_UP = '''"""A patch as cheap to bind as there is: it calls what was there before."""

import functools
import types

TARGETS = {targets!r}


def wrap(original):
    if type(original) is not types.FunctionType:
        return original

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return original(*args, **kwargs)

    return wrapper


def bindings(variant, options):
    return dict.fromkeys(TARGETS[variant], wrap)
'''


def installed(directory: Path) -> Path:
    """shim as users install it: its wheel, unpacked below `directory`. A checkout also looks for edited files."""
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    shutil.rmtree(TOP / "build", ignore_errors=True)  # files that are gone would come along
    subprocess.run([*wheel, "--wheel-dir", str(directory), str(TOP)], check=True)
    top = directory / "installed"
    shutil.unpack_archive(next(directory.glob("*.whl")), top, "zip")
    return top


def with_more_patches(directory: Path, patches: int) -> None:
    """A copy of shim below `directory` whose matrix has so many patches, pinned; those that shim lacks are made up."""
    for name in ("shim", "patches"):
        shutil.copytree(TOP / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    matrix = (TOP / "version_matrix.yaml").read_text("utf-8")
    texts = {
        found[1]: found[0]
        for found in re.finditer(r"(?m)^  ([a-z0-9-]+):\n(?:    .*\n)+", matrix.split("\npatches:\n")[1])
    }
    pins = json.loads((TOP / "version_matrix.lock.json").read_text("utf-8"))
    # A variant that only a known tree has is given by what is known of that tree, which made-up patches are not.
    every = load_matrix().patches
    real = {id: e for id, e in every.items() if set(e.variants) <= {rule.variant for rule in (*e.rules, *e.pairs)}}
    entries, more, left = [matrix], {}, patches - len(every)
    for number in range(1, 1 + -(-left // len(real))):
        for id, entry in list(real.items())[:left]:
            place = directory / "patches" / Path(*entry.module.split(".")[2:])
            made_up = place.with_name(f"{place.name}_{number}")
            made_up.mkdir()
            shutil.copy(place / "patch.yaml", made_up)
            targets = {name: variant.targets for name, variant in entry.variants.items()}
            (made_up / "__init__.py").write_text(MADE_UP.format(targets=targets), "utf-8")
            entries.append(texts[id].replace(id, f"{id}-{number}", 1))
            # A variant that no release has is that of a commit.
            entries[0] = re.sub(rf"(?m)^        {id}: (.+)$", rf"\g<0>\n        {id}-{number}: \1", entries[0])
            more[f"{id}-{number}"] = pins[id]
        left -= len(real)
    (directory / "version_matrix.yaml").write_text("".join(entries), "utf-8")
    (directory / "version_matrix.lock.json").write_text(json.dumps({**pins, **more}), "utf-8")
    environ = {**os.environ, "PYTHONPATH": str(directory)}
    subprocess.run([sys.executable, "-m", "shim._matrix"], check=True, env=environ, cwd=directory)


def cpu_seconds(program: str, environ: Mapping[str, str]) -> float:
    """User plus system time of a fresh interpreter that runs `program`."""
    child = os.posix_spawn(sys.executable, [sys.executable, "-W", "ignore", "-c", program], environ)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"{program!r} failed")
    return usage.ru_utime + usage.ru_stime


def instructions(program: str, environ: Mapping[str, str]) -> float:
    """Instructions that such an interpreter executes in user space, in thousands of millions."""
    cpu_seconds(program, environ)  # which writes byte code
    count = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    done = subprocess.run(
        [*count, sys.executable, "-W", "ignore", "-c", program],
        env={**environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(re.findall(r"I\s+refs:\s+([\d,]+)", done.stderr)[-1].replace(",", "")) / 1e9


def rounds(programs: Mapping[str, tuple[str, Mapping[str, str]]], runs: int) -> dict[str, float]:
    """The CPU time of each program in parts of that of "stock", by the median over rounds, which run each once."""
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(runs):
        seconds = {name: cpu_seconds(program, environ) for name, (program, environ) in programs.items()}
        for name, found in seconds.items():
            taken[name].append(found / seconds["stock"])
    return {name: statistics.median(ratios) for name, ratios in taken.items()}


def output_of(program: str, environ: Mapping[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env=dict(environ), capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


def say(name: str, found: float, limit: float, unit: str) -> bool:
    """Print a line; returns whether the limit was missed."""
    verdict = "ok" if found <= limit else "MISSED"
    print(f"  {name:<28} {found:8.3f} {unit} (at most {limit:g}: {verdict})", flush=True)
    return found > limit


def measure(release: str, runs: int, top: Path, limit: float = LIMIT) -> tuple[dict[str, Any], bool]:
    """Print the rows of a release for the shim at `top`; returns them, and whether a limit was missed."""
    from shim.testing.releases import fetch

    own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(fetch(release)), str(top)])}
    own.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its byte code
    below = {**own, "PYTHONPATH": os.pathsep.join([str(top / RUN.relative_to(TOP)), own["PYTHONPATH"]])}
    os.chdir(top)  # which comes first on the path of `python -c`
    programs = {name: (program, below if name == "under shim run" else own) for name, program in WAYS}
    programs = {"stock": (IMPORTS, own), **programs}
    counted = {name: instructions(program, environ) for name, (program, environ) in programs.items()}
    stock = counted.pop("stock")
    print(f"megatron-core {release}: {IMPORTS} takes {stock:.2f} thousand million instructions", flush=True)
    ways = {name: round(count / stock, 3) for name, count in counted.items()}
    missed = [say(name, ratio, limit, "of the imports alone") for name, ratio in ways.items()]
    if runs:
        seconds = rounds(programs, runs)
        print("  CPU time:", ", ".join(f"{name} {seconds[name]:.3f}" for name in ways), flush=True)
    opened, size = map(int, output_of(OPENS, own).split())
    missed.append(say("files opened by apply()", opened, MOST_OPENS, f"files, {size / 1e6:.1f} MB"))
    return {"ways": ways, "opened": opened, "megabytes": round(size / 1e6, 1)}, any(missed)


def main() -> int:
    parser = argparse.ArgumentParser(description="Startup cost of shim as ratios of instructions and of CPU time.")
    parser.add_argument("--releases", default=",".join(RELEASES), help="releases of megatron-core, with commas")
    parser.add_argument("--runs", type=int, default=0, help="rounds of the CPU time")
    parser.add_argument(
        "--patches", type=int, default=PATCHES, help="how many to measure besides those of today; 0: none"
    )
    parser.add_argument("--record", action="store_true", help="write docs/startup.json, for `make docs`")
    arguments = parser.parse_args()
    if shutil.which("valgrind") is None:
        parser.error("instructions are counted by valgrind, which is not installed. Remedy: apt-get install valgrind")
    releases, runs = arguments.releases.split(","), arguments.runs
    rows, missed = {}, False
    with tempfile.TemporaryDirectory() as scratch:
        top = installed(Path(scratch))
        for release in releases:
            rows[release], too_much = measure(release, runs, top)
            missed |= too_much
    found: dict[str, Any] = {"releases": rows, "patches": len(load_matrix().patches), "torch": version("torch")}
    if arguments.patches:
        with tempfile.TemporaryDirectory() as scratch:
            with_more_patches(Path(scratch), arguments.patches)
            print(f"with {arguments.patches} patches", flush=True)
            more, too_much = measure(releases[-1], runs, Path(scratch), LIMIT_OF_MORE)
            found["more"] = {"release": releases[-1], "patches": arguments.patches, **more}
            missed |= too_much
    if arguments.record:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
