"""verl: Hydra, with the settings of megatron-core below actor.megatron.override_transformer_config."""

from shim._configs.settings import MEGATRON
from shim._configs.trainers import GENERATES, NO_DATASETS, ONE, Trainer

TRAINER = Trainer(
    name="verl",
    marks=("actor_rollout_ref", "ppo_megatron_trainer", "override_transformer_config"),
    programs=("verl.trainer", "verl.experimental", "main_ppo"),
    settings={
        "mtp": ("mtp.enable", "mtp_num_layers > 0"),
        "router-replay": ("router_replay.mode", "moe_enable_routing_replay"),
        "packed": ("use_remove_padding", "pad_mode = no_padding"),
        "lora": ("lora_rank > 0", "lora.rank > 0", "lora_adapter_path", "lora.adapter_path"),
        "recompute": MEGATRON["recompute"],
        "checkpoint": ("save_freq > 0", "resume_from_path", "resume_mode = auto|resume_path"),
        "datasets": (),
        "fsdp": ("megatron.use_megatron_fsdp", "engine.use_megatron_fsdp"),
        "muon": ("optim.optimizer ~ muon", "override_optimizer_config.optimizer ~ muon"),
    },
    left_out=(*GENERATES, "fsdp_config", "veomni", "torchtitan", "reward_model", "reward", "checkpoint_engine"),
    engines=("strategy",),
    with_megatron=(
        "strategy = megatron",
        "model_engine = megatron",
        "choices.engine = megatron",
        "config_name ~ megatron",
        "megatron.tensor_model_parallel_size > 0",
        "megatron.pipeline_model_parallel_size > 0",
        "_target_ ~ mcore",
    ),
    without=(
        "strategy = fsdp|fsdp2|veomni|torchtitan|automodel",
        "model_engine = dp|veomni|torchtitan",
        "choices.engine = fsdp",
        "fsdp_config.param_offload = true|false",
    ),
    by_default={
        **ONE,
        **NO_DATASETS,
        "lora": False,
        "mtp": False,
        "recompute": False,
        "router-replay": False,
        "distributed-optimizer": True,
        "offloaded-optimizer": False,
    },
    without_by_default=True,
    implied={"sp": "tp"},
    configs={
        "verl.trainer.main_ppo": ("verl.trainer.config", "ppo_trainer"),
        "verl.trainer.sft_trainer": ("verl.trainer.config", "sft_trainer_engine"),
        "verl.trainer.sft_trainer_ray": ("verl.trainer.config", "sft_trainer_engine"),
        "verl.experimental.fully_async_policy.fully_async_main": (
            "verl.experimental.fully_async_policy.config",
            "fully_async_ppo_trainer",
        ),
        "verl.experimental.one_step_off_policy.main_ppo": (
            "verl.experimental.one_step_off_policy.config",
            "one_step_off_ppo_trainer",
        ),
    },
)
