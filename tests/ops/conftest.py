"""Kernels are tested in processes of their own: Triton decides at its import whether it interprets them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shim.testing.patience import patience

TOP = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def run_python():
    """Runs Python with these arguments and variables, from the top of the tree; what it has printed."""

    def run(*command, **environment):
        paths = os.pathsep.join([str(TOP), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
        return subprocess.run(
            [sys.executable, *command], env=environment, cwd=TOP, capture_output=True, text=True, timeout=patience()
        )

    return run


@pytest.fixture
def lines_of_compiling(run_python, tmp_path):
    """The lines that a program prints which compiles kernels for a device, where this Triton can."""

    def lines(program):
        done = run_python("-W", "ignore", "-c", program, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
        if "0 active drivers" in done.stderr or "No module named 'triton.backends" in done.stderr:
            pytest.skip("this Triton has no compiler for NVIDIA devices")
        if "'dict' object has no attribute 'hash'" in done.stderr:
            pytest.skip("Triton before 3.3 takes attributes of arguments in another form")
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()

    return lines


@pytest.fixture(params=[0, 8], ids=["mask", "gaps"], scope="module")
def mask_or_gaps(request):
    """A roll by a mask of all positions, and by the gaps between few sequences, which a CPU clears one by one."""
    import shim.ops.roll

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shim.ops.roll, "_FEW", request.param)
        yield
