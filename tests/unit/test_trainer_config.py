"""What a trainer's own configuration says: which files are followed, what is known, and what a user is told."""

import os
import subprocess
import sys

import pytest

from shim._configs.misspelt import perhaps_misspelt
from shim._configs.trainer_config import run_of_configs
from shim._errors import OptionError

SWIFT = """
model: Qwen/Qwen3-30B-A3B
train_type: lora
packing: true
tensor_model_parallel_size: 2
sequence_parallel: true
expert_model_parallel_size: 4
recompute_granularity: full
optimizer_cpu_offload: false
save_interval: 100
"""
VERL = """
actor_rollout_ref:
  model: {use_remove_padding: true, lora: {rank: 16}}
  actor:
    megatron:
      {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 2, override_transformer_config: {mtp_num_layers: 1}}
  rollout: {name: vllm, tensor_model_parallel_size: 8, expert_model_parallel_size: 8}
trainer: {save_freq: 20}
"""
NEMO_RL = """
policy:
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 4
    context_parallel_size: 2
    activation_checkpointing: true
    apply_rope_fusion: true
    optimizer: {use_distributed_optimizer: true, optimizer: adam}
  dtensor_cfg: {enabled: false, expert_parallel_size: 4}
  sequence_packing: {enabled: true}
  generation: {vllm_cfg: {pipeline_parallel_size: 2}}
"""
MEGATRON = """#!/bin/bash
# --num-experts 64 is for the large one
TP=${TP:-4}
export EP=8
ARGS=(
    --tensor-model-parallel-size $TP
    --expert-model-parallel-size=${EP}
    --pipeline-model-parallel-size ${PP}   # comes from the cluster
    --num-experts 8 --moe-router-topk 2
    --multi-latent-attention
    --sequence-parallel \\
    --no-rope-fusion
    --fp8-format hybrid --optimizer muon
)
torchrun pretrain_gpt.py ${ARGS[@]}
"""
HYDRA = """python -m verl.trainer.main_ppo actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \\
    actor_rollout_ref.rollout.expert_parallel_size=8 actor_rollout_ref.model.use_remove_padding=True
"""


def run_of(tmp_path, text, te=True, name="run.config", **more):
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return run_of_configs([str(file)], te, **more)


def written(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def notes_of(run):
    return "\n".join(run.notes)


@pytest.mark.parametrize(
    "text, holding, not_holding, unknown",
    [
        (SWIFT, "lora packed tp sp ep recompute checkpoint moe", "offloaded-optimizer cp pp mtp", "mla fp8"),
        (VERL, "packed lora pp mtp checkpoint", "tp sp ep cp recompute", "moe fp8"),
        (NEMO_RL, "packed tp cp recompute fused-rope distributed-optimizer", "muon datasets", "moe lora sp ep pp"),
        (MEGATRON, "tp ep moe mla sp fp8 muon", "fused-rope cp lora mtp", "pp packed"),
        (HYDRA, "tp sp recompute packed", "ep cp pp mtp", "moe"),
    ],
    ids=["ms-swift", "verl", "NeMo-RL", "megatron", "Hydra"],
)
def test_what_a_file_says_is_known_and_the_rest_is_not(tmp_path, text, holding, not_holding, unknown):
    facts = run_of(tmp_path, text).facts
    found = {word: facts.get(word) for word in (*holding.split(), *not_holding.split(), *unknown.split())}
    wanted = {**dict.fromkeys(holding.split(), True), **dict.fromkeys(not_holding.split(), False)}
    assert found == {**wanted, **dict.fromkeys(unknown.split())}


def test_what_is_ignored_is_told(tmp_path):
    """How many settings say something, whose sizes are left out, and which sizes the file does not give."""
    notes = notes_of(run_of(tmp_path, VERL))
    assert "6 of 9 settings" in notes and "3 of them belong to an engine that generates" in notes
    assert "cp, ep: size 1, the default of verl" in notes


def test_ignored_settings_are_named_and_misspelt_ones_first(tmp_path):
    notes = run_of(tmp_path, "tensor_model_paralel_size: 2\nlr: 1.0e-4\nexpert_tensor_parallel_size: 1").notes
    assert "ignored, and perhaps misspelt: tensor_model_paralel_size (tensor_model_parallel_size?)" in notes
    assert "ignored: lr, expert_tensor_parallel_size" in notes
    many = run_of(tmp_path, "\n".join(f"key{n}: 1" for n in range(30))).notes
    assert any(note.endswith("key19 and 10 more") for note in many)


def test_a_word_of_another_name_or_a_plural_is_no_mistake():
    """q_lora_rank is no lora_rank, and enable no enabled: only a slip within a longer word is one."""
    known = ["lora_rank", "enabled", "save_steps", "recompute_granularity", "pipeline_model_parallel_size"]
    right = ["q_lora_rank", "enable", "save_step", "recompute_granularities", "expert_model_parallel_size"]
    assert perhaps_misspelt(right, known) == {}
    wrong = [
        "recompute_granularty",
        "pipeline_modelparallel_size",
        "pipeline_model_parallle_size",
        "recompute_granulority",
    ]
    assert list(perhaps_misspelt(wrong, known)) == wrong


def test_a_variable_that_is_not_in_the_file_decides_nothing(tmp_path):
    """Neither for nor against: what it holds may make the word true."""
    run = run_of(tmp_path, MEGATRON)
    assert any(note.startswith("cp: size 1") for note in run.notes) and "pp" not in run.facts
    assert any(note.endswith("run.config: pipeline_model_parallel_size") for note in run.notes)
    facts = run_of(tmp_path, "a: {tensor_model_parallel_size: '${oc.env:TP}', lora_rank: $RANK}").facts
    assert not {"tp", "lora", "sp"} & facts.keys()


def test_references_to_other_settings_are_followed(tmp_path):
    text = """
    actor_rollout_ref:
      actor: {megatron: {tensor_model_parallel_size: 4, context_parallel_size: "${oc.env:CP,2}"}}
      ref: {megatron: "${actor_rollout_ref.actor.megatron}"}
      critic: {megatron: {pipeline_model_parallel_size: "${.tensor_model_parallel_size}"}}
      model: {lora: {rank: "${oc.select:nowhere,0}"}, mtp: {enable: "${mul:1,0}"}}
    """
    facts = run_of(tmp_path, text, name="run.yaml").facts
    assert (facts["tp"], facts["cp"], facts["lora"]) == (True, True, False)
    assert not {"pp", "mtp"} & facts.keys()


@pytest.mark.parametrize("text", ["moe_router_dtype: fp64\nfreeze_moe_router: true", "--moe-router-topk 2 --lr 1"])
def test_settings_of_a_router_alone_do_not_make_a_mixture_of_experts(tmp_path, text):
    assert "moe" not in run_of(tmp_path, text).facts
    assert run_of(tmp_path, "expert_model_parallel_size: 4").facts["moe"]


@pytest.mark.parametrize("text", ["", "just words\n", "- 1\n- 2\n"])
def test_a_file_without_settings_is_refused(tmp_path, text):
    with pytest.raises(OptionError, match="has no settings"):
        run_of(tmp_path, text)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(OptionError, match="cannot be read"):
        run_of_configs([str(tmp_path / "none.yaml")], True)


@pytest.mark.parametrize("name", ["run.yaml", "run.json", "run.config"])
def test_invalid_yaml_is_told_with_the_line_of_the_parser(tmp_path, name):
    with pytest.raises(OptionError, match=r"line 3 is no YAML: .*mapping"):
        run_of(tmp_path, "model:\n  lora_rank: 8\n bad: [1\n", name=name)


def test_a_run_without_megatron_is_told(tmp_path):
    run = run_of(tmp_path, "python -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=fsdp", name="run.sh")
    assert run.words == "a run without megatron" and "another engine of verl" in notes_of(run)
    assert not any(holds for word, holds in run.facts.items() if word != "te")


# Files that name others


def test_relative_defaults_are_followed_and_the_file_itself_wins(tmp_path):
    written(
        tmp_path,
        {
            "base.yaml": "policy: {megatron_cfg: {tensor_model_parallel_size: 4, context_parallel_size: 2}}",
            "low/two.yaml": "defaults: ../base.yaml\npolicy: {megatron_cfg: {pipeline_model_parallel_size: 8}}",
        },
    )
    text = "defaults: [two.yaml]\npolicy: {megatron_cfg: {context_parallel_size: 1}}"
    run = run_of(tmp_path, text, name="low/run.yaml")
    assert [run.facts.get(word) for word in ("tp", "cp", "pp", "ep")] == [True, False, True, None]
    places = [os.path.relpath(tmp_path / name) for name in ("low/two.yaml", "base.yaml")]
    assert f"followed: {', '.join(places)}" in run.notes
    assert "1 of 1 settings" in notes_of(run)  # of the file itself


def test_sizes_are_unknown_if_a_base_is_not_found(tmp_path):
    run = run_of(
        tmp_path, "defaults: ../base.yaml\npolicy: {megatron_cfg: {tensor_model_parallel_size: 4}}", name="a/r.yaml"
    )
    assert not {"cp", "pp", "ep", "sp"} & run.facts.keys()
    assert f"cp, pp, ep: size unknown: {tmp_path}/a/r.yaml names ../base.yaml, which was not found" in notes_of(run)
    assert "size 1" not in notes_of(run) and "--config-path" in notes_of(run)
    written(tmp_path, {"else/base.yaml": "policy: {megatron_cfg: {context_parallel_size: 2}}"})
    found = run_of_configs([str(tmp_path / "a/r.yaml")], True, [str(tmp_path / "else")])
    assert found.facts["cp"] and "not found" not in notes_of(found)


def test_a_cycle_is_an_error_with_file_and_line(tmp_path):
    written(tmp_path, {"b.yaml": "x: 1\n\ndefaults:\n  - a.yaml\n"})
    with pytest.raises(OptionError, match=r"b.yaml, line 4 \(defaults\) closes a cycle: a.yaml -> b.yaml -> a.yaml"):
        run_of(tmp_path, "defaults: b.yaml\npolicy: {a: 1}", name="a.yaml")
    written(tmp_path, {"b.sh": "source a.sh\n"})
    with pytest.raises(OptionError, match=r"source a.sh closes a cycle"):
        run_of(tmp_path, "source b.sh\n", name="a.sh")


VERLS = {
    "verl/trainer/config/ppo_trainer.yaml": """
        defaults:
          - model_engine: dp
          - actor@actor_rollout_ref.actor: ${model_engine}_actor
          - optional nothing@a: none
          - _self_
        actor_rollout_ref: {model: {lora_rank: 0}}
    """,
    "verl/trainer/config/ppo_megatron_trainer.yaml": """
        defaults:
          - ppo_trainer
          - override model_engine: megatron
          - _self_
    """,
    "verl/trainer/config/model_engine/dp.yaml": "# @package _global_\nmodel_engine: dp",
    "verl/trainer/config/model_engine/megatron.yaml": "# @package _global_\nmodel_engine: megatron",
    "verl/trainer/config/actor/dp_actor.yaml": "strategy: fsdp",
    "verl/trainer/config/actor/megatron_actor.yaml": """
        defaults:
          - ../engine@megatron: megatron
          - actor
          - _self_
        strategy: megatron
    """,
    "verl/trainer/config/actor/actor.yaml": "strategy: ???\nrouter_replay: {mode: disabled}",
    "verl/trainer/config/engine/megatron.yaml": """
        tensor_model_parallel_size: 1
        context_parallel_size: 2
        pipeline_model_parallel_size: 1
        expert_model_parallel_size: 1
        sequence_parallel: true
    """,
}


def test_the_defaults_of_hydra_are_composed(tmp_path):
    """Groups and packages, an option that another one chooses, `override` and a searchpath."""
    written(tmp_path, VERLS)
    text = "hydra: {searchpath: [file://verl/trainer/config]}\ndefaults: [ppo_megatron_trainer, _self_]\n"
    text += "trainer: {save_freq: 5}"
    run = run_of(tmp_path, text, name="examples/config/run.yaml")
    words = ("tp", "cp", "pp", "ep", "lora", "router-replay", "checkpoint")
    assert [run.facts.get(word) for word in words] == [False, True, False, False, False, False, True]
    assert "not found" not in notes_of(run)


@pytest.mark.parametrize(
    "more",
    [
        "model_engine=megatron",
        "--config-name=ppo_megatron_trainer",
        "--config-path=config --config-name ppo_megatron_trainer",
    ],
)
def test_the_config_of_a_program_is_read_with_the_groups_of_its_command_line(tmp_path, more):
    written(tmp_path, VERLS)
    text = f"python3 -m verl.trainer.main_ppo {more} actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4"
    run = run_of(tmp_path, text, name="examples/run.sh")
    assert (run.facts["tp"], run.facts["cp"], run.facts["sp"]) == (True, True, True), run.notes


def test_without_them_hydras_defaults_leave_sizes_unknown(tmp_path):
    text = "defaults: [ppo_megatron_trainer, _self_]\n"
    text += "actor_rollout_ref: {actor: {megatron: {tensor_model_parallel_size: 2}}}"
    run = run_of(tmp_path, text, name="run.yaml")
    assert run.facts["tp"] and not {"cp", "pp", "ep"} & run.facts.keys()
    assert "names ppo_megatron_trainer, which was not found; give --config-path" in notes_of(run)
    written(tmp_path, VERLS)
    folder = str(tmp_path / "verl/trainer/config")
    assert run_of_configs([str(tmp_path / "run.yaml")], True, [folder]).facts["cp"]


SOURCING = """
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "%s"
python3 train.py ${MODEL_ARGS[@]} --rollout-batch-size 8 --tensor-model-parallel-size $TP
"""


@pytest.mark.parametrize(
    "name", ["${SCRIPT_DIR}/models/x.sh", "models/x.sh", "$(dirname $0)/models/x.sh", "/root/away/models/x.sh"]
)
def test_sourced_files_are_followed(tmp_path, name):
    written(tmp_path, {"models/x.sh": "TP=4\nMODEL_ARGS=(\n  --num-layers 2 # don't\n  --num-experts 8\n)\n"})
    run = run_of(tmp_path, SOURCING % name, name="run.sh")
    assert run.facts["moe"] and run.facts["tp"] and run.facts["cp"] is False


@pytest.mark.parametrize("line", ["bash models/x.sh", 'exec "$(dirname "$0")/models/x.sh" "$@"', "./models/x.sh"])
def test_a_script_that_this_one_runs_is_read(tmp_path, line):
    text = "python3 train.py --rollout-batch-size 8 --num-experts 8 --tensor-model-parallel-size $TP"
    written(tmp_path, {"models/x.sh": text})
    run = run_of(tmp_path, f"export TP=4\n{line}", name="run.sh")
    assert run.facts["moe"] and run.facts["tp"] and run.facts["cp"] is False


@pytest.mark.parametrize("is_there", [False, True])
def test_arguments_of_a_script_are_settings(tmp_path, is_there):
    written(tmp_path, {"models/x.sh": "python3 train.py --rollout-batch-size 8 --num-experts 8"} if is_there else {})
    run = run_of(tmp_path, "./models/x.sh --rollout-batch-size 8 --tensor-model-parallel-size 2", name="run.sh")
    assert run.facts["tp"] and bool(run.facts.get("moe")) == is_there


def test_a_script_names_only_what_it_runs_itself(tmp_path):
    first = "bash away.sh\npython3 train.py --num-experts 8"
    written(tmp_path, {"first.sh": first, "second.sh": "bash here", "here": ""})
    with pytest.raises(OptionError, match=r"second\.sh has no settings: [^.]*a\.b=c$"):
        run_of_configs([str(tmp_path / "first.sh"), str(tmp_path / "second.sh")], True)


def test_a_script_without_settings_says_what_it_runs(tmp_path):
    with pytest.raises(OptionError, match=r"has no settings.* It runs away/\.\.\.\.sh, which was not found"):
        run_of(tmp_path, 'bash "away/$BASE.sh"', name="run.sh")


def test_a_sourced_file_that_is_not_there_is_named_and_leaves_sizes_unknown(tmp_path):
    run = run_of(tmp_path, SOURCING % "$MODELS/x.sh", name="run.sh")
    assert not {"tp", "cp", "moe"} & run.facts.keys()
    assert "run.sh names $MODELS/x.sh, which was not found" in notes_of(run)
    run = run_of(tmp_path, SOURCING % "/opt/env/bin/activate", name="run.sh")
    assert run.facts["cp"] is False and "sets up an environment" in notes_of(run)


def test_a_config_that_a_command_names_is_read_below_its_arguments(tmp_path):
    written(tmp_path, {"conf/sft.yaml": "tuner_type: lora\ntensor_model_parallel_size: 2\ncontext_parallel_size: 2"})
    run = run_of(tmp_path, "megatron sft --config conf/sft.yaml --context_parallel_size 1", name="run.sh")
    assert [run.facts[word] for word in ("lora", "tp", "cp")] == [True, True, False]


# What a script says


@pytest.mark.parametrize(
    "script, tp",
    [
        ('if [ "$BIG" = 1 ]; then TP=8; else TP=1; fi', None),
        ('BIG=1; if [ "$BIG" = 1 ]; then TP=8; else TP=1; fi', True),
        ("BIG=${BIG:-0}; if [[ $BIG == 1 ]]; then TP=8; elif [ $BIG -eq 0 ]; then TP=1; fi", False),
        ('if [ -z "$TP" ]; then TP=2; fi', True),
        ('case "$SIZE" in 8b) TP=1;; 70b|72b) TP=8;; esac', None),
        ("SIZE=72b\ncase $SIZE in\n 8b)\n TP=1\n ;;\n 70b|72b)\n TP=8\n ;;\nesac", True),
        ("TP=4; TP=$((TP / 2))", True),
        ("for TP in 1 2; do", None),
        ("for TP in 2; do", True),
        ('read TP <<< "$x"', None),
        ("TP=$(nvidia-smi -L | wc -l)", None),
        ("TP=1 # TP=2", False),
        (": ${TP:=2}", True),
    ],
)
def test_variables_and_conditions_of_a_script(tmp_path, script, tp):
    text = f"{script}\ntorchrun pretrain_gpt.py --num-layers 2 --train-iters 5 --tensor-model-parallel-size $TP"
    assert run_of(tmp_path, text, name="run.sh").facts.get("tp") is tp


def test_a_flag_under_an_unknown_condition_is_not_known(tmp_path):
    text = "A=(--num-layers 2)\nif [ $HAS ]; then A+=(--fp8-format hybrid); fi\n"
    text += "python pretrain_gpt.py --train-iters 1 ${A[@]}"
    run = run_of(tmp_path, text, name="run.sh")
    assert "fp8" not in run.facts and "fp8_format" in notes_of(run)


@pytest.mark.parametrize(
    "command",
    [
        'CMD="python pretrain_gpt.py $ARGS"; eval $CMD',
        'srun bash -c "python pretrain_gpt.py ${ARGS}"',
        "srun bash <<EOF\npython pretrain_gpt.py $ARGS\nEOF",
        "read -r -d '' IN <<'EOF' || true\ncd x\npython pretrain_gpt.py ${ARGS}\nEOF\nbash -c \"a=1; ${IN}\"",
    ],
)
def test_a_command_within_words_is_read(tmp_path, command):
    text = f'ARGS=" --num-layers 2 \\\n --train-iters 5 --context-parallel-size 2"\n{command}\n'
    assert run_of(tmp_path, text, name="run.sh").facts["cp"]


def test_only_commands_that_train_count(tmp_path):
    text = "swift rollout --tuner_type lora --tensor_model_parallel_size 8\n"
    text += 'run="megatron rlhf --tensor_model_parallel_size 1 --tuner_type full"; eval $run'
    run = run_of(tmp_path, text, name="run.sh")
    assert run.facts["tp"] is False and run.facts["lora"] is False


def test_a_launcher_in_python_is_read_and_not_run(tmp_path):
    text = """
raise SystemExit
args = f"--num-layers 2 --train-iters {n} --tensor-model-parallel-size 2 --context-parallel-size {cp} "
if fp8:
    args += "--fp8-format e4m3 "
cfg.model.pipeline_model_parallel_size = 4
"""
    facts = run_of(tmp_path, text, name="run.py").facts
    assert facts["tp"] and facts["pp"] and not {"cp", "fp8"} & facts.keys()
    with pytest.raises(OptionError, match=r"run.py, line 1 is no Python"):
        run_of(tmp_path, "def (", name="run.py")


# Several files, and --for


def test_several_files_merge_and_the_later_wins(tmp_path):
    a = "policy: {megatron_cfg: {tensor_model_parallel_size: 4, context_parallel_size: 2}}"
    written(tmp_path, {"a.yaml": a, "b.yaml": "policy.megatron_cfg.context_parallel_size: 1"})
    run = run_of_configs([str(tmp_path / name) for name in ("a.yaml", "b.yaml")], True)
    assert run.facts["tp"] and run.facts["cp"] is False and "b.yaml" in notes_of(run)
    assert run_of_configs([str(tmp_path / "b.yaml"), str(tmp_path / "a.yaml")], True).facts["cp"]


def test_the_config_of_a_model_adds_what_the_model_is(tmp_path):
    written(
        tmp_path,
        {"config.json": '{"architectures": ["X"], "n_routed_experts": 64, "kv_lora_rank": 512}', "t.yaml": SWIFT},
    )
    run = run_of_configs([str(tmp_path / name) for name in ("t.yaml", "config.json")], True)
    assert run.facts["mla"] and run.facts["moe"] and run.facts["tp"] and run.facts["cp"] is False
    alone = run_of_configs([str(tmp_path / "config.json")], True)
    assert alone.facts["moe"] and not {"tp", "recompute"} & alone.facts.keys()


def test_words_of_for_are_added(tmp_path):
    run = run_of(tmp_path, SWIFT, words="muon,router-replay")
    assert run.facts["muon"] and run.facts["router-replay"] and run.facts["tp"] and run.facts["cp"] is False
    assert run.notes[0] == "named by --for: moe, router-replay, muon"


def test_a_folder_of_config_path_must_be_there(tmp_path):
    with pytest.raises(OptionError, match=r"--config-path .*none is no folder"):
        run_of(tmp_path, SWIFT, folders=[str(tmp_path / "none")])


def test_the_tables_of_trainers_are_loaded_for_config_alone():
    code = "import sys; from shim._tools.cli import main; main(['plan']); "
    code += "print([m for m in sys.modules if 'configs' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.rstrip().endswith("[]"), done.stdout + done.stderr


# How miles gives a script the arguments of its model.
PRINTS = 'LINE="$(python3 "${ROOT}/utils/model_args_utils.py" "MODEL")" || exit 1\nread -ra MODEL_ARGS <<< "${LINE}"\n'
PRINTS += "python3 train.py ${MODEL_ARGS[@]} --tensor-model-parallel-size 2 --rollout-batch-size 8\n"


OF_BOTH = "--hf-checkpoint m --rollout-batch-size 8 --actor-num-gpus-per-node 8 --tensor-model-parallel-size 2\n"


@pytest.mark.parametrize(
    ("line", "trainer"),
    [
        ("pkill -9 slime", "slime"),
        ("echo smiles", "slime"),
        ('cd "${MILES_ROOT}"', "miles"),
        ("# --wandb-project miles-dev", "miles"),
    ],
)
def test_a_script_of_a_fork_is_told_by_its_name(tmp_path, line, trainer):
    """With slime's arguments. miles has the distributed optimizer only with some optimizers."""
    run = run_of(tmp_path, f"{line}\npython3 train.py {OF_BOTH}", name="run.sh")
    assert f"as those of {trainer};" in notes_of(run)
    assert run.facts.get("distributed-optimizer") is (True if trainer == "slime" else None)


@pytest.mark.parametrize("model", ["large", "variant"])
def test_arguments_that_a_function_of_python_returns_are_read_and_not_run(tmp_path, model):
    models = tmp_path / "scripts/models"
    models.mkdir(parents=True)
    text = "--num-layers 4 --num-experts 32 --moe-grouped-gemm "
    (models / "large.py").write_text(f"def model_args(n=1):\n    return ({text!r}\n        f'--seq-length {{n}} ')\n")
    (models / "variant.py").write_text(
        "def model_args():\n    return load_sibling_model_args(__file__, 'large', n=2)\n"
    )
    run = run_of(tmp_path, PRINTS.replace('"MODEL"', f'"{model}"'), name="run.sh")
    assert run.facts["moe"] is True and run.facts["tp"] is True and run.facts["pp"] is False


@pytest.mark.parametrize("model", ["missing", "${NAME}"])
def test_arguments_of_a_model_that_is_not_at_hand_are_missed(tmp_path, model):
    run = run_of(tmp_path, PRINTS.replace('"MODEL"', f'"{model}"'), name="run.sh")
    assert "moe" not in run.facts and "mtp" not in run.facts and "pp" not in run.facts
    assert "run.sh names scripts/models/" in notes_of(run) and "was not found" in notes_of(run)


def test_a_file_that_says_nothing_is_told_so(tmp_path):
    assert run_of(tmp_path, "hello: 1\n").words == "a run for which no word is known to hold"
