"""examples/trainer: on every layout and by every launcher, its losses are those of each sequence alone on one rank."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shim import testing
from shim.testing.patience import patience

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "trainer"
RELEASE = "0.16.1"
TRAIN = (sys.executable, str(EXAMPLE / "train.py"))
RUN = (sys.executable, "-m", "shim", "run", "--")
ALONE = ("--packing", "false")
ADAPTERS, EXPERTS = ("--lora_rank", "4"), ("--num_experts", "4")


def on_ranks(world):
    return sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", TRAIN[1]


# launcher, arguments of the model, arguments of the layout
CASES = {
    "alone": (TRAIN, (), ()),
    "LoRA": (TRAIN, ADAPTERS, ()),
    "DP 2": (on_ranks(2), (), ()),
    "TP 2": (on_ranks(2), (), ("--tp", "2")),
    "CP 2": (on_ranks(2), (), ("--cp", "2")),
    "PP 2, LoRA": (on_ranks(2), ADAPTERS, ("--pp", "2")),
    "TP 2, LoRA, shim run": ((*RUN, *on_ranks(2)), ADAPTERS, ("--tp", "2")),
    "EP 2": (on_ranks(2), EXPERTS, ("--ep", "2")),
    "TP 2, CP 2": (on_ranks(4), (), ("--tp", "2", "--cp", "2")),
    "TP 2, PP 2": (on_ranks(4), (), ("--tp", "2", "--pp", "2")),
    "EP 2, PP 2": (on_ranks(4), EXPERTS, ("--ep", "2", "--pp", "2")),
    "Ray, TP 2": ((sys.executable, str(EXAMPLE / "on_ray.py"), "2"), (), ("--tp", "2")),
}


@functools.cache
def losses(command, release=RELEASE, **variables):
    """Of two steps, from what a run prints."""
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("MEGATRON_SHIM_", "RAY_"))}
    environment |= testing.environment(testing.fetch(release), environment) | variables
    done = subprocess.run(
        [*command, "--train_iters", "2"], env=environment, capture_output=True, text=True, timeout=patience()
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    lines = [line for line in done.stdout.splitlines() if "] " in line and "/2  loss " in line]
    assert len(lines) == 2, done.stdout
    return [float(loss) for line in lines for loss in re.findall(r"\d+\.\d+", line)]


@pytest.mark.parametrize("case", CASES)
def test_every_layout_and_launcher_has_the_truths_losses(case):
    """The truth is trained without shim, but for experts, which stock cannot build there without Transformer Engine."""
    if "Ray" in case:
        pytest.importorskip("ray", reason="ray is not installed; `make integration` does so")
    launcher, model, layout = CASES[case]
    off = {} if model == EXPERTS else {"MEGATRON_SHIM_DISABLE": "1"}
    truth = losses((*TRAIN, *model, *ALONE), **off)
    assert losses((*launcher, *model, *layout)) == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("layout", ["alone", "CP 2"])
def test_stock_has_others(layout):
    launcher, _, sizes = CASES[layout]
    found = losses((*launcher, *sizes), MEGATRON_SHIM_DISABLE="1")
    truth = losses((*TRAIN, *ALONE), MEGATRON_SHIM_DISABLE="1")
    assert found != pytest.approx(truth, rel=1e-4)


@pytest.mark.parametrize("release", ["0.12.0", "0.14.0", "0.19.2"])
def test_other_releases(release):
    truth = losses((*TRAIN, *ALONE), release, MEGATRON_SHIM_DISABLE="1")
    assert losses(TRAIN, release) == pytest.approx(truth, rel=1e-6)
