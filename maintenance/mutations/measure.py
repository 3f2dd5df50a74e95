"""Measure mutants: whether stock still works on them, and whether the patch's tests pass.

    python maintenance/mutations/measure.py                             all that stand in measured.json, again
    python maintenance/mutations/measure.py --add 8 --cells 0.19.2 ...  up to 8 of each body, those that are missing

One process per cell loads torch and the release; every mutant is a fork of it, in which upstream's function is replaced
before shim is applied. Outcomes go to measured.json as they come. What the proofs say of these trees is asked by
proving.py.
"""

import argparse
import ast
import collections
import contextlib
import functools
import hashlib
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MEASURED = HERE / "measured.json"
SECONDS = 240  # for the tests of one mutant


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", help="0.19.2, 0.19.2+2.20.2")
    parser.add_argument("--patches", nargs="*")
    parser.add_argument("--add", type=int, default=0, metavar="N", help="measure up to N mutants of each body")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cells = options.cells or list(read())
    if options.here:
        return measure(cells[0], options.patches, options.add)
    from shim.testing.cells import _fetch
    from shim.testing.releases import environment

    for cell in cells:
        command = [sys.executable, "-W", "ignore", str(HERE / "measure.py"), "--here", "--cells", cell]
        command += ["--add", str(options.add)]
        command += ["--patches", *options.patches] if options.patches else []
        subprocess.run(command, cwd=ROOT, env=environment(_fetch(cell)), check=True)
    return 0


def measure(cell: str, patches: list[str] | None, add: int) -> int:
    sys.path[:0] = [str(ROOT / "tests/support")]
    _load(cell)
    from shim._matrix.load import load_matrix

    work = [_work(load_matrix(), cell, id, add) for id in patches or load_matrix().patches]
    # In turns, so that a run that is cut short has measured something of every patch.
    for turn in itertools.zip_longest(*filter(None, work)):
        for run in filter(None, turn):
            run()
    return 0


def _work(matrix, cell: str, id: str, add: int) -> list:
    """For each mutant of a patch a function that measures it. Empty where the unchanged release does not pass."""
    from selected import PROBES_OF, STASH_SINCE, TESTS, tests_of

    from shim._releases.sources import Sources

    distribution = matrix.patches[id].distribution
    release = dict(zip(("megatron-core", "transformer-engine"), cell.split("+"))).get(distribution)
    pin = matrix.pins[distribution].get(release, {}).get(id)
    folder = "pairs" if "+" in cell else "cells"
    if id not in TESTS or TESTS[id][0] != folder or pin is None or pin.variant is None:
        return []
    variant, sources = matrix.patches[id].variants[pin.variant], Sources()
    known = read().get(cell, {}).get(id, {})
    todo, count = [], collections.Counter()
    for body, mutant in _spread(mutants_of(sources, id, variant)):
        measured = known.get(body, {}).get(mutant.name, {}).get("text") == digest(mutant.text)
        count[body] += 1
        if measured != bool(add) and (measured or count[body] <= add or mutant.kind == "by hand"):
            todo.append((body, mutant))
    if not todo:
        return []
    _collected(tests_of(id))
    probes = [name for name in PROBES_OF[id] if name != "fp8" or folder == "pairs"]
    probes = [name for name in probes if name != "stash" or _numbers() >= STASH_SINCE]
    started = time.monotonic()
    stock = _forked(lambda: _stock(probes), SECONDS)
    tested = _forked(lambda: _tests(tests_of(id), sys.stdout), SECONDS)
    took = time.monotonic() - started
    print(f"{cell} {id}: {len(todo)} mutants; unchanged: {stock} {tested} {took:.1f} s", flush=True)
    if stock.get("error") or tested.get("tests") != "pass":
        return []

    def run(body, mutant) -> None:
        began = time.monotonic()
        found = _outcome(sources, body, mutant, probes, stock["digest"], tests_of(id))
        _write(cell, id, body, mutant, found)
        print(f"{time.monotonic() - began:6.1f} s {body.split(':')[1]} | {mutant.name} | {found}", flush=True)

    return [functools.partial(run, *item) for item in todo]


def mutants_of(sources, id: str, variant) -> list:
    """(body, mutant) for all bodies of a variant that are one function, those written by hand first."""
    from handwritten import handwritten
    from mutants import generate

    from shim._errors import SourceError
    from shim._releases.fingerprint import definitions, split_target

    found = []
    for target in variant.bodies:
        body = variant.inherits(target) or target
        module, qualname = split_target(body)
        try:
            there = [definition.node for definition in definitions(sources.tree(module), qualname)]
        except SourceError:
            continue
        if len(there) == 1 and isinstance(there[0], ast.FunctionDef):
            found += [(body, mutant) for mutant in (*handwritten(id, body, there[0]), *generate(there[0]))]
    return found


def _spread(mutants: list) -> list:
    """The same, so that the first ones are of all bodies and kinds. Of those alike a hash of their text says which."""
    alike = sorted(mutants, key=lambda item: hashlib.sha256(item[1].text.encode()).digest())
    seen: collections.Counter = collections.Counter()
    places = []
    for body, mutant in alike:
        seen[body, mutant.kind] += 1
        places.append((mutant.kind != "by hand", seen[body, mutant.kind]))
    return [alike[at] for at in sorted(range(len(alike)), key=places.__getitem__)]


def measured_mutants(ids=None):
    """(cell, patch, body, name, what was measured, mutant) of every mutant of these patches that is still the same."""
    from shim._matrix.load import load_matrix
    from shim._releases.sources import Sources
    from shim.testing.releases import fetch

    matrix = load_matrix()
    for cell, patches in read().items():
        releases = dict(zip(("megatron-core", "transformer-engine"), cell.split("+")))
        for id, bodies in patches.items():
            if ids and id not in ids:
                continue
            entry = matrix.patches[id]
            release = releases[entry.distribution]
            variant = entry.variants[matrix.pins[entry.distribution][release][id].variant]
            sources = Sources([fetch(release, entry.distribution)])
            known = {(body, mutant.name): mutant for body, mutant in mutants_of(sources, id, variant)}
            for body, mutants in bodies.items():
                for name, found in mutants.items():
                    mutant = known.get((body, name))
                    if mutant is not None and digest(mutant.text) == found["text"]:
                        yield cell, id, body, name, found, mutant


def _numbers() -> tuple[int, ...]:
    import shim.testing

    return tuple(int(part) for part in shim.testing.release().split(".")[:2])


def _load(cell: str) -> None:
    """All that forks share: what is imported here is imported once."""
    import warnings

    warnings.simplefilter("ignore")
    if "+" in cell:
        from shim import testing

        testing.transformer_engine_on_cpu()
    import logging

    import megatron.core.models.gpt.gpt_model  # noqa: F401
    import torch

    for name in (
        "megatron.core.fusions.fused_cross_entropy",
        "megatron.core.transformer.moe.experts",
        "megatron.core.transformer.moe.paged_stash",
        "megatron.core.models.hybrid.hybrid_model",
        "megatron.core.models.mamba.mamba_model",
        "megatron.core.full_cuda_graph",
        "megatron.core.recompute",
        "megatron.core.distributed.finalize_model_grads",
    ):
        with contextlib.suppress(ImportError):
            __import__(name)
    logging.disable(logging.WARNING)
    torch._dynamo.config.disable = True  # compiling takes most of the time


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read() -> dict:
    return json.loads(MEASURED.read_text()) if MEASURED.exists() else {}


def _write(cell, id, body, mutant, found) -> None:
    table = read()
    entry = {"text": digest(mutant.text), **found}
    table.setdefault(cell, {}).setdefault(id, {}).setdefault(body, {})[mutant.name] = entry
    write(table)


def write(table: dict, file: Path = MEASURED) -> None:
    """One line for each mutant, so that a diff shows what has changed."""
    with tempfile.NamedTemporaryFile("w", dir=HERE, delete=False) as scratch:
        scratch.write(_rendered(table) + "\n")
    os.replace(scratch.name, file)


def _rendered(value: object, depth: int = 0) -> str:
    if not isinstance(value, dict) or not all(isinstance(item, dict) for item in value.values()):
        return json.dumps(value)
    lines = (f"{' ' * depth} {json.dumps(key)}: {_rendered(value[key], depth + 1)}" for key in sorted(value))
    return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"


def _outcome(sources, body, mutant, probes, expected, tests) -> dict:
    from placing import NotPlaced, place

    def placed(run):
        try:
            place(sources, body, mutant)
        except NotPlaced as error:
            return {"error": f"not placed: {error}"}
        return run()

    def run():
        stock = _stock(probes)
        if stock.get("error"):
            return {"stock": stock["error"]}
        if stock["digest"] != expected:
            return {"stock": "gives something else"}
        return {"stock": "works", **_tests(tests, io.StringIO())}

    found = _forked(lambda: placed(run), SECONDS)
    return {"stock": found["error"]} if "error" in found else found


def _collected(tests) -> None:
    """What the tests import is imported by the parent of all forks."""
    import pytest

    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *(arguments[0] for arguments in tests)])


def _stock(probes) -> dict:
    from stock import digest_of

    try:
        return {"digest": digest_of(probes)}
    except Exception as error:  # whatever a mutant raises
        return {"error": f"raises {type(error).__name__}"}


class _First:
    """A plugin that remembers the first failure."""

    def __init__(self) -> None:
        self.said, self.passed = "", 0

    def pytest_runtest_logreport(self, report) -> None:
        self.passed += report.when == "call" and report.passed
        if report.failed and not self.said:
            text = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr))
            first = re.sub(r"0x[0-9a-f]+", "0x", " ".join(text.split()))[:90]
            self.said = f"{report.nodeid.rpartition('::')[2]}: {first}"


def _tests(tests, output) -> dict:
    import pytest

    first = _First()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        for arguments in tests:
            status = pytest.main(
                ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:warnings"]
                + ["-p", "no:unraisableexception", "-p", "no:threadexception", *arguments],
                plugins=[first],
            )
            if status not in (0, 5):
                return {"tests": "fail", "first": first.said or f"pytest ends with {status}"}
    return {"tests": "pass", "passed": first.passed}


def _forked(run, seconds: float) -> dict:
    """What `run` gives in a fork of this process, which has a process group of its own and so many seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.close(reading)
        try:
            devnull = os.open(os.devnull, os.O_WRONLY)
            if not os.environ.get("SHIM_SHOW"):
                os.dup2(devnull, 1)
                os.dup2(devnull, 2)
            found = run()
        except BaseException as error:
            found = {
                "error": f"raises {type(error).__name__}: {traceback.format_exception_only(error)[-1].strip()[-300:]}"
            }
        with os.fdopen(writing, "w") as end:
            end.write(json.dumps(found))
        os._exit(0)
    os.close(writing)
    import select

    deadline, text = time.monotonic() + seconds, b""
    while True:
        left = deadline - time.monotonic()
        ready = select.select([reading], [], [], max(left, 0))[0]
        if not ready:
            os.killpg(child, signal.SIGKILL)
            break
        part = os.read(reading, 1 << 16)
        if not part:
            break
        text += part
    os.close(reading)
    os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # ranks that are left
    if not text:
        return {"tests": "fail", "first": "no end, or a crash", "error": "no end, or a crash"}
    return json.loads(text)


if __name__ == "__main__":
    sys.exit(main())
