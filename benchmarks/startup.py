"""CPU time that shim adds to a trainer's start, as ratios in one run, with its parts, and with more patches.

    python benchmarks/startup.py [--release-dir DIR] [--runs N] [--patches 84]

Whole programs run alternately, each in a fresh interpreter; user and system time come from the operating system. The
first run of each, which writes byte code and fills the page cache, is not counted. `shim.apply()` on loaded modules is
measured inside one process, against the import of megatron.core.models.gpt (and so of torch) in that same process.
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
from pathlib import Path

RELEASE = "0.19.2"
TOP = Path(__file__).resolve().parent.parent
MODELS = "import torch, megatron.core.models.gpt"
PAIRS = (  # program, what it is compared with, the limit, and how many times fewer runs
    ("import shim", "import shim", "import argparse, dataclasses", 1.5, 1),
    ("shim.plan()", "import shim; shim.plan()", MODELS, 0.05, 4),
    ("shim.apply()", "import shim; shim.apply()", MODELS, 0.05, 4),
)
LOADED_LIMIT = 0.1
PATCHES = 84  # four times those that there were when the limits were set

LOADED = """
import json, time
start = time.process_time()
import megatron.core.models.gpt
imported = time.process_time()
import shim
report = shim.apply()
applied = time.process_time()
assert not [p for p in report.patches.values() if p.state in ("failed", "conflict", "drifted")], str(report)
print(json.dumps([imported - start, applied - imported, len(report.applied)]))
"""

# Each part counts without those that it calls and that are parts as well.
PARTS = """
import json, sys, time
LOADED = %r
if LOADED:
    import megatron.core.models.gpt
spent, inner = {}, [0.0]
def timed(name, function):
    def wrapper(*args, **kwargs):
        start = time.process_time()
        inner.append(0.0)
        try:
            return function(*args, **kwargs)
        finally:
            took = time.process_time() - start
            spent[name] = spent.get(name, 0.0) + took - inner.pop()
            inner[-1] += took
    return wrapper
def import_all():
    import shim._api
timed("import shim's modules", import_all)()
def time_it(owner, attribute, name):
    setattr(owner, attribute, timed(name, getattr(owner, attribute)))
import shim, shim._api as api
import shim._engine.binder as binder, shim._engine.conflicts as conflicts, shim._engine.draft as draft
import shim._engine.engine as engine
import shim._engine.factories as factories, shim._planning.plan as plan, shim._releases.sources as sources
time_it(api, "load_matrix", "read the matrix")
time_it(api, "detect", "detect releases")
time_it(sources.Sources, "digest", "read and hash sources")
time_it(sources, "parse", "parse sources")
time_it(plan, "match", "match")
time_it(plan, "identity_of", "digest")
time_it(engine, "with_conflicts", "look for conflicts")
time_it(factories.Factories, "load", "load patches")
time_it(draft, "find_aliases", "look for aliases")
time_it(binder.Binder, "commit", "bind")
timed("everything else", shim.apply)()
print(json.dumps(spent))
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
    from shim._matrix.load import load_matrix

    real = load_matrix().patches
    entries, more, left = [matrix], {}, patches - len(real)
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


def compare(program: str, against: str, runs: int, environ: Mapping[str, str]) -> tuple[float, float]:
    """Medians of `runs` alternating runs of both programs."""
    taken = [(cpu_seconds(program, environ), cpu_seconds(against, environ)) for _ in range(runs + 1)][1:]
    return statistics.median(mine for mine, _ in taken), statistics.median(other for _, other in taken)


def loaded(runs: int, environ: Mapping[str, str]) -> tuple[float, float, int]:
    """Median seconds of the import of megatron's models, and of `import shim` and apply() after it; patches applied."""
    found = [json.loads(output_of(LOADED, environ)) for _ in range(runs)]
    imported, applied, patches = (statistics.median(column) for column in zip(*found))
    return imported, applied, int(patches)


def output_of(program: str, environ: Mapping[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env=dict(environ), capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


def say(name: str, mine: float, against: str, other: float, limit: float) -> bool:
    """Print a line; returns whether the limit was missed."""
    ratio = mine / other
    verdict = "ok" if ratio <= limit else "MISSED"
    print(f"{name:<26} {mine * 1e3:7.1f} ms  {against:<54} {other * 1e3:7.1f} ms  ratio {ratio:5.3f}", end="")
    print(f"  (at most {limit}: {verdict})", flush=True)
    return ratio > limit


def say_parts(what: str, environ: Mapping[str, str], is_loaded: bool) -> None:
    """Print the parts of an apply(), largest first: medians of seven processes."""
    found = [json.loads(output_of(PARTS % is_loaded, environ)) for _ in range(7)]
    spent = {name: statistics.median(one.get(name, 0.0) for one in found) for name in found[0]}
    parts = sorted(spent.items(), key=lambda item: -item[1])
    print(f"parts of apply() {what}: " + ", ".join(f"{name} {took * 1e3:.1f} ms" for name, took in parts), flush=True)


def measure(release: str, top: Path, more: int, runs: int) -> bool:
    """Print all rows for the shim at `top`; returns whether a limit was missed."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([release, str(top)])}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its byte code
    os.chdir(top)  # which comes first on the path of `python -c`
    suffix = f", {more} patches" if more else ""
    missed = False
    for name, program, against, limit, fewer in PAIRS:
        mine, other = compare(program, against, max(3, runs // fewer), environ)
        missed |= say(name + suffix, mine, against, other, limit)
    imported, applied, patches = loaded(max(3, runs // 4), environ)
    against = f"import megatron.core.models.gpt ({patches} patches applied)"
    missed |= say("apply() loaded" + suffix, applied, against, imported, LOADED_LIMIT)
    say_parts("before megatron" + suffix, environ, False)
    say_parts("on loaded modules" + suffix, environ, True)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description="Startup cost of shim as ratios of CPU time.")
    parser.add_argument("--release-dir", help=f"an unpacked megatron-core; default: {RELEASE}, fetched")
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--patches", type=int, default=PATCHES, help="how many to measure besides those of today")
    arguments = parser.parse_args()
    release = arguments.release_dir
    if release is None:
        from shim.testing.releases import fetch

        release = str(fetch(RELEASE))
    missed = measure(release, TOP, 0, arguments.runs)
    with tempfile.TemporaryDirectory() as scratch:
        with_more_patches(Path(scratch), arguments.patches)
        missed |= measure(release, Path(scratch), arguments.patches, arguments.runs)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
