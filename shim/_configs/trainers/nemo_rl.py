"""NeMo-RL: YAML with `defaults`, and megatron's settings below megatron_cfg."""

from shim._configs.trainers import GENERATES, NO_DATASETS, Trainer

TRAINER = Trainer(
    name="NeMo-RL",
    marks=("megatron_cfg", "dtensor_cfg", "policy.model_name", "policy.generation", "policy.train_global_batch_size"),
    programs=("run_grpo", "run_sft", "run_dpo", "run_rm", "run_distillation", "run_vlm_grpo", "run_ppo", "nemo_rl"),
    settings={
        "router-replay": ("router_replay.enabled", "moe_enable_routing_replay"),
        "packed": ("sequence_packing.enabled",),
        "lora": (
            "peft.enabled",
            "megatron_cfg.lora_cfg.enabled",
            "freeze_config.freeze_language_model",
            "megatron_cfg.freeze_language_model",
        ),
        # recompute_granularity counts only beside it.
        "recompute": ("activation_checkpointing",),
        "fp8": ("fp8_cfg.enabled", "megatron_cfg.fp8_cfg.fp8 & fp8_cfg.enabled"),
        "checkpoint": ("checkpointing.enabled",),
        "fsdp": ("use_custom_fsdp", "use_megatron_fsdp"),
        "muon": ("optimizer.optimizer ~ muon",),
        "datasets": (),
    },
    left_out=(*GENERATES, "dtensor_cfg", "automodel_kwargs", "reward_model_cfg", "env", "sglang_cfg", "trtllm_cfg"),
    with_megatron=("megatron_cfg.enabled",),
    without=("!megatron_cfg.enabled", "dtensor_cfg.enabled"),
    by_default={**NO_DATASETS, "per-token-loss": True},
    sizes_from="the configs that it is based on",
)
