"""What a trainer's own arguments say: files as those of ms-swift, verl and NeMo-RL, and scripts with --flags."""

import pytest

from shim._errors import OptionError
from shim._tools.trainer_config import run_of_config

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


def run_of(tmp_path, text, te=True):
    file = tmp_path / "run.config"
    file.write_text(text)
    return run_of_config(str(file), te)


@pytest.mark.parametrize(
    "text, holding, not_holding, unknown",
    [
        (SWIFT, "lora packed tp sp ep recompute checkpoint moe", "offloaded-optimizer cp pp", "mtp mla fp8"),
        (VERL, "packed lora pp mtp checkpoint", "tp sp ep cp", "moe recompute"),
        (NEMO_RL, "packed tp cp recompute fused-rope distributed-optimizer", "ep pp muon", "moe lora sp"),
        (MEGATRON, "tp ep moe mla sp fp8 muon", "fused-rope cp", "pp packed lora mtp"),
        (HYDRA, "tp recompute packed", "ep cp pp", "moe mtp sp"),
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
    notes = "\n".join(run_of(tmp_path, VERL).notes)
    assert "6 of 9 settings" in notes and "3 of them belong to an engine that generates" in notes
    assert "cp, ep: size 1, because" in notes


def test_ignored_settings_are_named_and_misspelt_ones_first(tmp_path):
    notes = run_of(tmp_path, "tensor_model_paralel_size: 2\nlr: 1.0e-4\nexpert_tensor_parallel_size: 1").notes
    assert "ignored, and perhaps misspelt: tensor_model_paralel_size (tensor_model_parallel_size?)" in notes
    assert "ignored: lr, expert_tensor_parallel_size" in notes
    many = run_of(tmp_path, "\n".join(f"key{n}: 1" for n in range(30))).notes
    assert any(note.endswith("key19 and 10 more") for note in many)


def test_a_variable_that_is_not_in_the_file_decides_nothing(tmp_path):
    """Neither for nor against: what it holds may make the word true."""
    run = run_of(tmp_path, MEGATRON)
    assert any(note.startswith("cp: size 1") for note in run.notes) and "pp" not in run.facts
    assert any(note.endswith("run.config: pipeline_model_parallel_size") for note in run.notes)
    facts = run_of(tmp_path, "a: {tensor_model_parallel_size: '${oc.env:TP}', lora_rank: $RANK}").facts
    assert not {"tp", "lora", "sp"} & facts.keys()


@pytest.mark.parametrize("text", ["expert_model_parallel_size: 4", "moe_aux_loss_coeff: 1e-3", "--moe-grouped-gemm"])
def test_experts_are_seen_although_their_number_is_in_the_models_own_config(tmp_path, text):
    assert run_of(tmp_path, text).facts["moe"]
    assert "moe" not in run_of(tmp_path, "moe_aux_loss_coeff: 0").facts


@pytest.mark.parametrize("text", ["", "just words\n", "- 1\n- 2\n"])
def test_a_file_without_settings_is_refused(tmp_path, text):
    with pytest.raises(OptionError, match="has no settings"):
        run_of(tmp_path, text)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(OptionError, match="cannot be read"):
        run_of_config(str(tmp_path / "none.yaml"), True)
