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
# A layout of two ranks, and of what its loss is a mean. Of tokens, each context-parallel rank of miles counts all, so
# that experts are balanced and multi-token prediction is trained CP times less hard, with shim, too.
LAYOUTS = {
    "TP 2": ({"tensor_model_parallel_size": 2}, "tokens"),
    "CP 2": ({"context_parallel_size": 2}, "sequences"),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A function: (loss, loss of multi-token prediction, norm, log-probability before) of each step."""
    home = tmp_path_factory.mktemp("miles")
    tokenizer = commands.model("qwen2", home / "qwen2", TRAINERS, OWN, TE)

    @functools.cache
    def run(how, layout, mean):
        ranks = 2 if layout else 1
        sizes = LAYOUTS[layout][0] if layout else {}
        where = home / "-".join([*how.split(), *layout.split(), mean])
        where.mkdir()
        line = [*commands.torchrun(ranks), SCRIPT, tokenizer, where, json.dumps(sizes), mean, how]
        by = "shim run" if how == "shim run" else "stock"
        said = commands.run(line, by, where, TRAINERS, OWN, TE, SHIM_TEST_OF_THE_TRAINER="miles_on_cpu")
        steps = [tuple(map(float, found.split())) for found in re.findall(r"^step: (.*)$", said, re.MULTILINE)]
        assert len(steps) == 3, said[-3000:]
        assert (where / "saved" / "latest_checkpointed_iteration.txt").exists()
        return steps

    run("stock", "", "tokens")  # writes the weights that all start from
    return run


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", ["shim run", "late"])
def test_experts_on_two_ranks_train_like_on_one(told, how, layout):
    """Also after its checkpoint was loaded in the middle."""
    mean = LAYOUTS[layout][1]
    assert commands.off(told(how, layout, mean), told("stock", "", mean)) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_stock_they_do_not(told, layout):
    mean = LAYOUTS[layout][1]
    assert commands.off(told("stock", layout, mean), told("stock", "", mean)) > 1e-4
