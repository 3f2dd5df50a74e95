"""verl's own SFT trainer with its Megatron engine, three steps, stock and under `shim run`."""

import functools
import re

import commands
import pytest

pytest.importorskip("ray", reason="ray is not installed; `make integration` does so")

# The engine's two ways to a model, with releases that each takes: mbridge asks for a name that is gone from 0.17 on.
MBRIDGE = ("verl", "mbridge==0.15.1"), "0.16.1", "2.12.0", "verl_in_fp32"
BRIDGE = ("verl", "megatron-bridge==0.6.2"), "0.19.2", "2.20.2", "verl_in_fp32 bridge_on_cpu"
OPTIONS = [
    "engine=megatron",
    "optim=megatron",
    "engine.dtype=bfloat16",
    "engine.sequence_parallel=False",
    "+engine.override_transformer_config.gradient_accumulation_fusion=False",
    "+engine.override_transformer_config.masked_softmax_fusion=False",
    "+engine.override_transformer_config.bias_dropout_fusion=False",
    "+engine.override_transformer_config.bias_activation_fusion=False",
    "data.train_batch_size=8",
    "data.micro_batch_size_per_gpu=4",
    "data.use_dynamic_bsz=False",
    "data.max_length=128",
    "data.num_workers=0",
    "data.ignore_input_ids_mismatch=True",
    "optim.lr=1e-3",
    "trainer.total_training_steps=3",
    "trainer.total_epochs=1",
    "trainer.logger=[console]",
    "trainer.resume_mode=disable",
    "checkpoint.save_contents=[model]",
]
CP = ("engine.context_parallel_size=2",)
EP = ("engine.expert_model_parallel_size=2",)
LORA = ("model.lora.rank=4",)


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A function of a model, a way, how, the number of ranks and options: losses and norms of each step, by name."""
    models = functools.cache(lambda kind: commands.model(kind, tmp_path_factory.mktemp("models") / kind, *MBRIDGE[:3]))

    @functools.cache
    def told(kind, way, how, ranks=1, options=()):
        trainers, core, te, needed = way
        where = tmp_path_factory.mktemp(how.replace(" ", "-"))
        line = [*commands.torchrun(ranks), "-m", "verl.trainer.sft_trainer", *OPTIONS, *options]
        line += [f"engine.vanilla_mbridge={way == MBRIDGE}", f"model.path={models(kind)}"]
        line += [f"data.train_files={models(kind)}/rows.parquet", f"trainer.default_local_dir={where}/out"]
        said = commands.run(line, how, where, trainers, core, te, SHIM_TEST_OF_THE_TRAINER=needed)
        lines = re.findall(r"step:\d - .*", said)  # behind a progress bar, some of them
        found = [dict(re.findall(r"(\S*(?:loss|grad_norm)\S*?):(\d[\d.e+-]*)", line)) for line in lines]
        assert len(found) == 3 and all("train/loss" in step for step in found), said[-3000:]
        return found

    return told


@pytest.mark.parametrize(
    "kind, way, ranks, options",
    [
        pytest.param("qwen2", MBRIDGE, 1, (), id="one rank"),
        pytest.param("qwen2", MBRIDGE, 2, CP, id="CP 2"),
        pytest.param("qwen3_moe", MBRIDGE, 1, (), id="experts"),
        pytest.param("qwen3_moe", MBRIDGE, 2, EP, id="experts, EP 2"),
        pytest.param("qwen2", BRIDGE, 1, LORA, id="LoRA"),
        pytest.param("qwen2", BRIDGE, 2, LORA + CP, id="LoRA, CP 2"),
    ],
)
def test_what_stock_has_right_keeps_its_digits(steps, kind, way, ranks, options):
    """All that are printed, of losses. Its rows have no padding, and an engine of so few options meets no defect."""
    found, stock = (steps(kind, way, how, ranks, options) for how in ("shim run", "stock"))
    assert [step["train/loss"] for step in found] == [step["train/loss"] for step in stock]
    assert norms(found) == pytest.approx(norms(stock), rel=1e-6)


@pytest.mark.parametrize(
    "kind, way, options, layout, off",
    [
        pytest.param("qwen2", MBRIDGE, (), CP, 0, id="CP 2"),
        pytest.param("qwen3_moe", MBRIDGE, (), EP, 1e-7, id="experts, EP 2"),  # the last digit of fp32 in one loss
        pytest.param("qwen2", BRIDGE, LORA, CP, 0, id="LoRA, CP 2"),
    ],
)
def test_two_ranks_have_the_losses_of_one(steps, kind, way, options, layout, off):
    one, two = (steps(kind, way, "shim run", *ranks) for ranks in ((1, options), (2, options + layout)))
    assert losses(two) == pytest.approx(losses(one), rel=off, abs=0)
    assert norms(two) == pytest.approx(norms(one), rel=1e-6)


def losses(steps):
    return [float(step["train/loss"]) for step in steps]


def norms(steps):
    return [float(step["train/grad_norm"]) for step in steps]
