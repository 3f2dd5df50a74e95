"""slime: megatron-core's arguments in a script, with its own beside them. It trains packed rows.

miles, a fork of it, has the arguments for LoRA, too. Only its name tells most of its scripts from those of slime.
"""

from shim._configs.settings import MEGATRON
from shim._configs.trainers import NO_DATASETS, ONE, Trainer

SETTINGS = {
    "mtp": ("enable_mtp_training", "mtp_num_layers > 0"),
    "router-replay": ("use_routing_replay", "use_rollout_routing_replay", "moe_enable_routing_replay"),
    "gated-attention": ("attention_output_gate", "use_gated_attention"),
    "fused-rope": ("!no_rope_fusion", "apply_rope_fusion"),
    "packed": ("qkv_format = thd",),
    "lora": (
        *("lora_rank > 0", "lora_adapter_path", "multi_lora_n_adapters > 0"),
        *("only_train_params_name_list", "freeze_params_name_list", "freeze_indexer"),
    ),
    "checkpoint": ("save", "load", "save_interval > 0"),
    # A script that gives a model's layers gives its experts, too. Otherwise they come from the checkpoint.
    "moe": (*MEGATRON["moe"], "!num_layers"),
    "mla": (*MEGATRON["mla"], "!num_layers"),
    "datasets": (),
}
BY_DEFAULT = {
    **ONE,
    **NO_DATASETS,
    "sp": False,
    "packed": True,
    "mtp": False,
    "lora": False,
    "recompute": False,
    "router-replay": False,
    "per-token-loss": False,
    "fp8": False,
    "offloaded-optimizer": False,
    "distributed-optimizer": True,
}
TRAINER = Trainer(
    name="slime",
    marks=("rollout_batch_size", "hf_checkpoint", "rollout_num_gpus_per_engine", "actor_num_gpus_per_node", "ref_load"),
    programs=("slime",),
    settings=SETTINGS,
    without=("train_backend = fsdp",),
    by_default=BY_DEFAULT,
)
