"""What waits for the next import is not done within the import of a module that it would need itself."""

import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).parents[2]

PROGRAM = """
import importlib.machinery, sys
import shim
from shim._matrix import load
load.TRUSTED = (*load.TRUSTED, "fake_patches")
shim.apply(packages=["fake_patches"])
assert "dis" not in sys.modules and "inspect" not in sys.modules

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
import inspect
import megatron.core.other
assert ops.double(2) == ("count", 4), ops.double(2)
assert shim.status()["count"].state == "pending"
"""


def test_a_late_import_of_inspect_finds_its_parts_whole(patched_world):
    """A target came past the hook, and then the program imports `inspect`, which imports `dis`."""
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
