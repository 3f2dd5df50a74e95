"""AReaL's own engine for Megatron: three steps of SFT and its checkpoint, stock, with shim first or late.

Its MegatronLMEngine, model, packing, loss, optimizer and checkpoints are real. Its servers are not imported.
"""

import functools
import json
import re
from pathlib import Path

import commands
import pytest

pytest.importorskip("ray", reason="ray is not installed; `make integration` does so")

TRAINERS = ["areal==1.0.4", "megatron-bridge==0.4.2", "mbridge==0.15.1"]
CORE, TE = "0.17.1", "2.14.1"
SCRIPT = Path(__file__).with_name("areal_trains.py")
TP = {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A function of how and of ranks: (loss, norm) of each step, and what became of its checkpoint."""
    model = commands.model("qwen3_moe", tmp_path_factory.mktemp("models") / "qwen3_moe", TRAINERS, CORE, TE)

    @functools.cache
    def run(how, ranks):
        where = tmp_path_factory.mktemp(how.replace(" ", "-"))
        layout = json.dumps(TP if ranks == 2 else {})
        line = [*commands.torchrun(ranks), SCRIPT, model, where, layout, how]
        by = "shim run" if how == "shim run" else "stock"
        said = commands.run(line, by, where, TRAINERS, CORE, TE, SHIM_TEST_OF_THE_TRAINER="areal_on_cpu")
        steps = [tuple(map(float, found)) for found in re.findall(r"^step: (\S+) (\S+)$", said, re.MULTILINE)]
        assert len(steps) == 3, said[-3000:]
        return steps, re.findall(r"^checkpoint: (.*)$", said, re.MULTILINE)

    return run


@pytest.mark.parametrize("how", ["shim run", "late"])
def test_experts_on_two_ranks_train_like_on_one(told, how):
    """Also after its checkpoint, which stock cannot write, was loaded in the middle."""
    (steps, checkpoint), (truth, _) = told(how, 2), told("stock", 1)
    assert commands.off(steps, truth) < 1e-6
    assert checkpoint == ["saved and loaded"]


def test_on_stock_they_do_not(told):
    (steps, checkpoint), (truth, _) = told("stock", 2), told("stock", 1)
    assert commands.off(steps, truth) > 1e-4
    assert checkpoint == ["not saved: ShardedTensor.flattened_range is not supported."]
