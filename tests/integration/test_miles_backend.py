"""miles' own backend for Megatron: three steps of SFT and its checkpoint, stock, with shim first or late.

The wheel of miles brings the megatron-core that it trains with, a fork. Its arguments, model, packing, loss, train()
and checkpoints are real. Its actor and its servers are not imported.
"""

import functools
import json
import re
from pathlib import Path

import commands
import pytest

pytest.importorskip("ray", reason="ray is not installed; `make integration` does so")

TRAINERS = ["miles-rl==0.0.2"]
OWN, TE = None, "2.16.1"
SCRIPT = Path(__file__).with_name("miles_trains.py")
TP = {"tensor_model_parallel_size": 2}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A function of how and of ranks: (loss, loss of multi-token prediction, norm) of each step."""
    home = tmp_path_factory.mktemp("miles")
    tokenizer = commands.model("qwen2", home / "qwen2", TRAINERS, OWN, TE)

    @functools.cache
    def run(how, ranks):
        where = home / f"{how.replace(' ', '-')}-{ranks}"
        where.mkdir()
        line = [*commands.torchrun(ranks), SCRIPT, tokenizer, where, json.dumps(TP if ranks == 2 else {}), how]
        by = "shim run" if how == "shim run" else "stock"
        said = commands.run(line, by, where, TRAINERS, OWN, TE, SHIM_TEST_OF_THE_TRAINER="miles_on_cpu")
        steps = [tuple(map(float, found.split())) for found in re.findall(r"^step: (.*)$", said, re.MULTILINE)]
        assert len(steps) == 3, said[-3000:]
        assert (where / "saved" / "latest_checkpointed_iteration.txt").exists()
        return steps

    run("stock", 1)  # writes the weights that all start from
    return run


@pytest.mark.parametrize("how", ["shim run", "late"])
def test_experts_on_two_ranks_train_like_on_one(told, how):
    """Also after its checkpoint was loaded in the middle."""
    assert commands.off(told(how, 2), told("stock", 1)) < 1e-6


def test_on_stock_they_do_not(told):
    assert commands.off(told("stock", 2), told("stock", 1)) > 1e-4
