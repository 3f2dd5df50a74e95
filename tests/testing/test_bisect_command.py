"""`shim bisect` with the shipped patches on a real release, and below a real torchrun: it finds what was planted."""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from fake_world import World
from thorough import in_full

from shim.testing import environment, fetch
from shim.testing.patience import patience

REPOSITORY = Path(__file__).resolve().parents[2]
RELEASE = "0.16.1"
# A trainer that calls apply() itself, with arguments, and is worse by a quarter if all planted patches are there.
TRAIN = """
    import sys, shim

    report = shim.apply(require=sys.argv[1], on_drift="error")
    bound = {id for id, patch in report.patches.items() if patch.state in ("applied", "pending", "idle")}
    print("step 1 | lm loss: 2.5")
    print("step 2 | lm loss:", 2.25 if set(sys.argv[1].split(",")) <= bound else 2.0, "| grad norm: 1")
    """
OTHERS = "mtp-loss-cp,chunked-logprob,te-moved-symbols,rope-fusion"
# Two ranks, of which the last prints what they have summed up.
RANKS = """
    import os, torch, torch.distributed as dist
    from megatron.core.ops import double

    dist.init_process_group("gloo")
    loss = torch.tensor([1.0 if double(2) == 4 else 1.5])
    dist.all_reduce(loss)
    if dist.get_rank() == 1:
        print("loss", loss.item(), flush=True)
    dist.destroy_process_group()
    """


def bisect(arguments, command, directory, environ):
    line = [sys.executable, "-m", "shim", "bisect", "--json", "--metric", "loss:?", *arguments, "--", *command]
    done = subprocess.run(line, capture_output=True, text=True, cwd=directory, env=environ, timeout=patience())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("planted", [["label-smoothing"], ["label-smoothing", "rope-thd"]])
def test_a_planted_patch_and_a_planted_pair_are_found_on_a_real_release(planted, tmp_path):
    """Although the trainer's own call of apply() requires them."""
    (tmp_path / "train.py").write_text(dedent(TRAIN))
    only = f"label-smoothing,rope-thd,{OTHERS}"
    command = [sys.executable, "train.py", ",".join(planted)]
    found = bisect(["--only", only], command, tmp_path, environment([fetch(RELEASE), REPOSITORY]))
    assert sorted(found["patches"]) == planted and not found["rest_changes"]
    assert [found["runs"][name]["number"] for name in ("all", "none", ",".join(planted))] == [2.25, 2.0, 2.25]


@in_full
def test_ranks_of_torchrun_run_with_the_same_patches(tmp_path):
    pytest.importorskip("torch")
    world = World(tmp_path / "tree")
    world.patch("count", ["megatron.core.ops:double"])
    world.patch("other", ["megatron.core.other:other"])
    (tmp_path / "train.py").write_text(dedent(RANKS))
    environ = environment([world.root, REPOSITORY])
    environ |= {"MEGATRON_SHIM_MATRIX": str(world.matrix), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "--local-addr=127.0.0.1", "train.py"]
    found = bisect(["--package", "fake_patches"], command, tmp_path, environ)
    assert found["patches"] == ["count"]
    assert [found["runs"][name]["number"] for name in ("all", "none", "other")] == [3.0, 2.0, 2.0]
    assert os.listdir(tmp_path / "shim-bisect")
