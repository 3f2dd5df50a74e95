"""Megatron-Bridge's own finetune() of its recipes, stock and under `shim run`: losses and norms of three steps.

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
EXPERTS = "qwen.qwen3_moe:qwen3_30b_a3b_sft_config"
MTP = {"mtp_num_layers": 1, "calculate_per_token_loss": True}
CP = {"context_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
TP_EP = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "sequence_parallel": True}
ONE_RANK = dict.fromkeys((*TP_EP, "pipeline_model_parallel_size"), 1)
ONE_RANK |= {"sequence_parallel": False, "calculate_per_token_loss": True}
# What a recipe starts from, and what its model has beside.
MODELS = {FULL: ("qwen2", MTP), LORA: ("qwen2", MTP), EXPERTS: ("qwen3_moe", ONE_RANK)}
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PADDED = {"dataset": {"packed_sequence_specs": {"pad_seq_to_mult": 8}}, "ddp": {"average_in_collective": False}}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A function of a recipe, options of the model, how and ranks: its losses and norm of each step, as printed."""
    model = functools.cache(
        lambda kind: commands.model(kind, tmp_path_factory.mktemp("models") / kind, TRAINERS, CORE, TE)
    )

    def run(what, recipe, options, how, ranks):
        where = tmp_path_factory.mktemp(what)
        kind, of_the_model = MODELS[recipe]
        options = PADDED | options | {"model": of_the_model | options["model"]}
        line = [*commands.torchrun(ranks), SCRIPT, what, recipe, model(kind), where, json.dumps(options)]
        said = commands.run(line, how, where, TRAINERS, CORE, TE, SHIM_TEST_OF_THE_TRAINER="bridge_on_cpu")
        return where, said

    @functools.cache
    def checkpoint(recipe):
        return {"pretrained_checkpoint": str(run("import", recipe, {"model": {}}, "stock", 1)[0] / "checkpoint")}

    @functools.cache
    def told(recipe, options, how, ranks):
        starts_from = checkpoint(EXPERTS if recipe == EXPERTS else FULL)
        said = run("finetune", recipe, {"model": dict(options), "checkpoint": starts_from}, how, ranks)[1]
        lines = re.findall(r" lm loss: .*", said)
        assert len(lines) == 3, said[-3000:]
        return [tuple(map(float, re.findall(r" (?:loss|grad norm): (\S+) ", line))) for line in lines]

    return lambda recipe, options, how, ranks=1: told(recipe, tuple(options.items()), how, ranks)


@pytest.mark.parametrize(
    "recipe, layout",
    [
        pytest.param(FULL, CP, id="CP 2"),
        pytest.param(LORA, CP, id="LoRA, CP 2"),
        pytest.param(EXPERTS, TP_EP, id="experts, TP 2, SP, EP 2"),
    ],
)
def test_two_ranks_have_the_losses_of_one(steps, recipe, layout):
    """Stock takes the mean of multi-token prediction over each rank's own targets, and balances experts otherwise."""
    truth = steps(recipe, {}, "stock")
    assert commands.off(steps(recipe, layout, "shim run", 2), truth) < 1e-6
    assert commands.off(steps(recipe, layout, "stock", 2), truth) > 1e-5


@pytest.mark.parametrize("how", ["stock", "shim run"])
def test_expert_parallelism_alone_has_the_losses_of_one_rank(steps, how):
    """Stock is right here, and has to stay so."""
    assert commands.off(steps(EXPERTS, EP, how, 2), steps(EXPERTS, {}, "stock")) < 1e-6


@pytest.mark.parametrize("options", [{}, UNIFORM], ids=["kept", "recomputed"])
def test_adapters_have_the_losses_of_stock(steps, options):
    """Also with full recompute, which stock of this release refuses with packed rows and multi-token prediction."""
    assert commands.off(steps(LORA, options, "shim run"), steps(LORA, {}, "stock")) < 1e-6
