"""Megatron-Bridge's own finetune() of its recipes, stock and under `shim run`: losses of three steps.

Its data sets pack the rows and give the offsets of padding. Its provider, step, optimizer and checkpoints are real.
"""

import functools
import json
import re
from pathlib import Path

import commands
import pytest

TRAINERS = ["megatron-bridge==0.4.2"]
CORE, TE = "0.17.1", "2.14.1"
SCRIPT = Path(__file__).with_name("bridge_finetunes.py")
FULL, LORA = "qwen.qwen2:qwen2_500m_sft_config", "qwen.qwen2:qwen2_500m_peft_config"
MTP = {"mtp_num_layers": 1, "calculate_per_token_loss": True}
CP = {"context_parallel_size": 2}
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PADDED = {"dataset": {"packed_sequence_specs": {"pad_seq_to_mult": 8}}, "ddp": {"average_in_collective": False}}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A function of a recipe, options of the model, how and ranks: (loss, loss of MTP) of each step."""
    model = functools.cache(
        lambda: commands.model("qwen2", tmp_path_factory.mktemp("models") / "qwen2", TRAINERS, CORE, TE)
    )

    def run(what, recipe, options, how, ranks):
        where = tmp_path_factory.mktemp(what)
        line = [*commands.torchrun(ranks), SCRIPT, what, recipe, model(), where, json.dumps(PADDED | options)]
        said = commands.run(line, how, where, TRAINERS, CORE, TE, SHIM_TEST_OF_THE_TRAINER="bridge_on_cpu")
        return where, said

    @functools.cache
    def checkpoint():
        return {"pretrained_checkpoint": str(run("import", FULL, {"model": MTP}, "stock", 1)[0] / "checkpoint")}

    @functools.cache
    def told(recipe, options, how, ranks):
        said = run("finetune", recipe, {"model": MTP | dict(options), "checkpoint": checkpoint()}, how, ranks)[1]
        found = re.findall(r" lm loss: (\S+) \| mtp_1 loss: (\S+) ", said)
        assert len(found) == 3, said[-3000:]
        return [tuple(map(float, losses)) for losses in found]

    return lambda recipe, options, how, ranks=1: told(recipe, tuple(options.items()), how, ranks)


def test_two_ranks_of_context_parallelism_have_the_losses_of_one(steps):
    """Stock takes the mean of multi-token prediction over each rank's own targets."""
    truth = steps(FULL, {}, "stock")
    assert commands.off(steps(FULL, CP, "shim run", 2), truth) < 1e-6
    assert commands.off(steps(FULL, CP, "stock", 2), truth) > 1e-5


@pytest.mark.parametrize("options", [{}, UNIFORM], ids=["kept", "recomputed"])
def test_adapters_have_the_losses_of_stock(steps, options):
    """Also with full recompute, which stock of this release refuses with packed rows and multi-token prediction."""
    assert commands.off(steps(LORA, options, "shim run"), steps(LORA, {}, "stock")) < 1e-6
