"""The end of a block and a revert while the interpreter ends say nothing on stderr."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_world import World

from shim.testing.patience import patience

HEAD = """
import sys
sys.dont_write_bytecode = True
from fake_world import trust_fake_patches
trust_fake_patches()
import shim, megatron.core.ops as ops
"""

DURING = {
    # a block that is open when the program ends, and is closed by the collector
    "an open block": """
def block():
    with shim.patched():
        yield ops.double(2)
ops.kept = block()
print(next(ops.kept))
""",
    "an open block in another module": """
import types
sys.modules["holder"] = holder = types.ModuleType("holder")
holder.block = shim.patched()
print(holder.block.__enter__().applied)
""",
    "an open block in a cycle": """
def block():
    me = yield
    with shim.patched():
        yield me
cycle = [block()]
next(cycle[0]), cycle[0].send(cycle)
sys.kept = cycle
""",
}
for where in ("sys", "ops"):
    DURING[f"revert by __del__ of an object in {where}"] = f"""
class Late:
    def __del__(self, shim=shim):
        shim.revert()
{where}.kept = Late()
kept = {where}.kept
shim.apply()
"""
DURING["revert at exit"] = "import atexit\natexit.register(shim.revert)\nshim.apply()"
DURING["revert in a thread at exit"] = """
import atexit, threading
def late():
    thread = threading.Thread(target=shim.revert)
    thread.start()
    thread.join()
atexit.register(late)
shim.apply()
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    root = tmp_path_factory.mktemp("tree")
    world = World(root)
    world.patch("count", ["megatron.core.ops:double", "megatron.core.layers:Layer.forward"])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_SHIM_")}
    path = os.pathsep.join([str(root), str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])])
    return {**kept, "MEGATRON_SHIM_MATRIX": str(world.matrix), "PYTHONPATH": path}


@pytest.mark.parametrize("during", DURING)
def test_the_end_of_the_interpreter_is_quiet(environment, during):
    done = subprocess.run(
        [sys.executable, "-c", HEAD + DURING[during]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(),
    )
    assert (done.returncode, done.stderr) == (0, "")
