"""ROLL: YAML with a strategy for each role, and megatron's settings below strategy_config."""

from shim._configs.trainers import NO_DATASETS, ONE, Trainer

TRAINER = Trainer(
    name="ROLL",
    marks=("strategy_args", "actor_train", "actor_infer", "num_return_sequences_in_group"),
    programs=("start_rlvr_pipeline", "start_agentic_pipeline", "start_sft_pipeline", "start_dpo_pipeline", "roll"),
    settings={
        "packed": ("use_sequence_packing", "use_remove_padding"),
        "lora": ("lora_rank > 0", "lora_r > 0", "lora_target", "finetuning_type = lora"),
        "checkpoint": ("save_steps > 0", "resume_from_checkpoint"),
        "datasets": (),
    },
    left_out=("actor_infer", "vllm_args", "sglang_args"),
    engines=("strategy_name",),
    with_megatron=("strategy_name ~ megatron",),
    without=("strategy_name ~ deepspeed|fsdp|hf_",),
    by_default={**ONE, **NO_DATASETS, "lora": False, "packed": False, "mtp": False, "recompute": False, "sp": False},
)
