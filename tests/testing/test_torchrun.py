"""`shim run -- torchrun ...` with real torchrun: two processes, and one that each of them spawns."""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

pytest.importorskip("torch")

from fake_world import World

from shim.testing.patience import patience

REPOSITORY = Path(__file__).resolve().parents[2]
TRAIN = """
    import json, multiprocessing, os, sys


    def found():
        from megatron.core.ops import double
        return double(2)


    def write(path):
        with open(path, "w") as file:
            json.dump(found(), file)


    if __name__ == "__main__":
        rank, where = os.environ["RANK"], sys.argv[1]
        process = multiprocessing.get_context("spawn").Process(target=write, args=(f"{where}/spawned.{rank}",))
        process.start()
        write(f"{where}/rank.{rank}")
        process.join()
        import shim, torch.distributed as dist
        dist.init_process_group("gloo")
        with open(f"{where}/check.{rank}", "w") as file:
            json.dump(shim.check().applied, file)
        dist.destroy_process_group()
        sys.exit(process.exitcode)
    """


def test_every_process_of_torchrun_is_patched_before_it_imports_the_target(tmp_path):
    """The trainer does not mention shim before it checks; options of `shim run` reach all of them."""
    world = World(tmp_path / "tree")
    world.patch("count", ["megatron.core.ops:double"])
    world.patch("more", ["megatron.core.other:other"])
    (tmp_path / "train.py").write_text(dedent(TRAIN))
    (tmp_path / "out").mkdir()
    environ = {n: v for n, v in os.environ.items() if not n.startswith(("MEGATRON_SHIM_", "PYTHON"))}
    environ |= {
        "PYTHONPATH": os.pathsep.join(map(str, (world.root, REPOSITORY))),
        "MEGATRON_SHIM_MATRIX": str(world.matrix),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    chosen = ["--only", "count", "--package", "fake_patches"]
    command = [sys.executable, "-m", "shim", "run", *chosen, "--", *torchrun, "--local-addr=127.0.0.1"]
    done = subprocess.run(
        [*command, str(tmp_path / "train.py"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env=environ,
        timeout=patience(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(" applies 1 patch to megatron-core 9.9.0") == 1  # by rank 0, in one of its two processes
    found = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out").iterdir()}
    patched = {f"{what}.{rank}": ["count", 4] for what in ("rank", "spawned") for rank in (0, 1)}
    assert found == patched | {"check.0": ["count"], "check.1": ["count"]}
