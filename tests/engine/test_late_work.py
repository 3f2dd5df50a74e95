"""What waits for the next import needs no import of its own: a thread that holds the lock must not wait for another."""

import ast
import json
import subprocess
import sys
from pathlib import Path

from unit_helpers import output_of

TOP = Path(__file__).parents[2]

PROGRAM = """
import importlib.machinery, sys
import shim
from shim._matrix import load
load.TRUSTED = (*load.TRUSTED, "fake_patches")
shim.apply(packages=["fake_patches"])

class Own:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if name.startswith("megatron.core"):
            spec.loader = importlib.machinery.SourceFileLoader(spec.loader.name, spec.loader.path)
        return spec

sys.meta_path.insert(0, Own)
import megatron.core.ops as ops
sys.meta_path.remove(Own)
shim._api._engine.ENGINE.factories.load(shim._api._engine.ENGINE.plan, (), frozenset(sys.modules))
known = {*sys.modules, "colorsys", "a_trainer"}
import colorsys  # no module of Python's uses megatron, so that late work can wait
assert ops.double(2) == 4, ops.double(2)
import a_trainer
assert known == {*sys.modules}, {*sys.modules} ^ known
assert ops.double(2) == ("count", 4), ops.double(2)
import megatron.core.other
assert ops.double(2) == ("count", 4), ops.double(2)
assert shim.status()["count"].state == "pending"
"""


def test_late_work_imports_nothing(patched_world):
    """A target came past the hook, and is bound within the next import of a module that may use it."""
    (patched_world.root / "a_trainer.py").write_text("", "utf-8")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={
            "PYTHONPATH": f"{patched_world.root}:{TOP}",
            "MEGATRON_SHIM_MATRIX": str(patched_world.matrix),
            "PATH": "",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# Imported where models are tried, and where a report is written, both without the lock.
LATER = {f"shim.{name}" for name in ("_engine.models", "_printing.overview")}


def test_what_the_engine_imports_within_a_function_is_there_when_the_engine_is():
    """No code imports under the engine's lock. torch is imported where models are tried, without the lock."""
    within = set()
    for path in (TOP / "shim" / "_engine").glob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        for node in {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}:
            if isinstance(node, ast.ImportFrom):
                within.add(node.module)
            elif isinstance(node, ast.Import):
                within |= {alias.name for alias in node.names}
    there = json.loads(output_of("import json, sys, shim._engine.engine; print(json.dumps(sorted(sys.modules)))"))
    assert {name for name in within - set(there) if name.partition(".")[0] != "torch"} == LATER
