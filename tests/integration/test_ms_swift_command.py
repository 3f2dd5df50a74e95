"""ms-swift's own `megatron sft` and `megatron rlhf`, stock and under `shim run`: three steps of each.

From its arguments to a checkpoint: its dataset, packed rows, LoRA, mcore-bridge's models, schedules and optimizers.
"""

import functools
import json
import sys

import commands
import pytest

TRAINERS = ["mcore-bridge", "ms-swift"]
CORE, TE = "0.18.2", "2.16.1"
OPTIONS = {
    "torch_dtype": "float32",
    "fp16": "false",
    "bf16": "false",
    "template": "chatml",
    "max_length": 256,
    "train_iters": 3,
    "logging_steps": 1,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "lr": 1e-3,
    "lr_decay_style": "constant",
    "dataloader_num_workers": 0,
    "dataset_num_proc": 1,
    "dataloader_pin_memory": "false",
    "no_save_optim": "true",
    "split_dataset_ratio": 0,
    "add_version": "false",
    "check_model": "false",
    "masked_softmax_fusion": "false",
    "bias_dropout_fusion": "false",
    "bias_activation_fusion": "false",
    "gradient_accumulation_fusion": "false",
}
PACKED = {"packing": "true", "tuner_type": "full"}
LORA = {"tuner_type": "lora", "target_modules": "all-linear"}
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MTP = PACKED | {"mtp_num_layers": 1}
# Two of its weights share memory on a CPU, which the format refuses.
DEEPSEEK = MTP | {"save_safetensors": "false"}
# The name of the recipe pads each row to 256 tokens on one rank as on two; without an FP8 format it does nothing else.
MOE = PACKED | {"moe_aux_loss_coeff": 0.01, "fp8_recipe": "blockwise"}
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": "true", "expert_model_parallel_size": 2}
DPO = LORA | {"rlhf_type": "dpo", "padding_free": "true"}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A function of a model, how, the number of ranks and options: (loss, gradient norm) of each step."""
    models = functools.cache(
        lambda kind: commands.model(kind, tmp_path_factory.mktemp("models") / kind, TRAINERS, CORE, TE)
    )

    @functools.cache
    def told(kind, how, ranks, options, command="sft"):
        where = tmp_path_factory.mktemp(how.replace(" ", "-"))
        given = OPTIONS | dict(options) | {"model": models(kind), "model_type": kind, "output_dir": where / "out"}
        given["dataset"] = models(kind) / "rows.jsonl"
        line = [sys.executable, "-m", "swift.cli._megatron.main", command]
        for name, value in given.items():
            line += [f"--{name}", value]
        launcher = {"NPROC_PER_NODE": str(ranks), "MASTER_PORT": str(commands.free_port())}
        variables = {"MODELSCOPE_CACHE": str(where), "SHIM_TEST_OF_THE_TRAINER": "without_pictures"}
        commands.run(line, how, where, TRAINERS, CORE, TE, **variables, **launcher)
        lines = [json.loads(line) for line in (where / "out/logging.jsonl").read_text().splitlines()]
        found = [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]
        assert len(found) == 3
        return found

    return lambda kind, how, ranks, options, *command: told(kind, how, ranks, tuple(options.items()), *command)


@pytest.mark.parametrize(
    "kind, options, command",
    [
        pytest.param("qwen2", MTP | LORA | UNIFORM, "sft", id="MTP, LoRA, recompute"),
        pytest.param("deepseek_v3", DEEPSEEK, "sft", id="MLA, MTP, experts"),
        pytest.param("qwen2", DPO, "rlhf", id="DPO, LoRA"),
    ],
)
def test_what_stock_has_right_keeps_its_digits(steps, kind, options, command):
    """All that are printed. Its rows have an offset for each token of padding, which stock serves, too."""
    assert steps(kind, "shim run", 1, options, command) == steps(kind, "stock", 1, options, command)


def test_experts_on_two_ranks_train_like_those_on_one(steps):
    """Tensor, sequence and expert parallelism: stock balances experts by the counts of a rank's own tokens."""
    truth = steps("qwen3_moe", "stock", 1, MOE)
    assert commands.off(steps("qwen3_moe", "shim run", 2, MOE | TP), truth) < 2e-7
    assert commands.off(steps("qwen3_moe", "stock", 2, MOE | TP), truth) > 1e-4
