"""SkyRL: Hydra's a.b=c over a config that it has in Python, so that the defaults stand here."""

from shim._configs.settings import MEGATRON
from shim._configs.trainers import GENERATES, NO_DATASETS, ONE, Trainer

TRAINER = Trainer(
    name="SkyRL",
    marks=("megatron_config", "generator.inference_engine", "remove_microbatch_padding", "use_sample_packing"),
    programs=("skyrl",),
    settings={
        "mtp": ("mtp.enabled", "mtp_num_layers > 0"),
        "packed": ("remove_microbatch_padding", "use_sample_packing"),
        "lora": ("lora.rank > 0", "lora_rank > 0"),
        "recompute": (
            "gradient_checkpointing & recompute_granularity",
            "transformer_config_kwargs.recompute_granularity",
        ),
        "checkpoint": ("ckpt_interval > 0", "resume_mode = latest|from_path"),
        "router-replay": MEGATRON["router-replay"],
        "datasets": (),
    },
    left_out=(*GENERATES, "generator", "fsdp_config"),
    with_megatron=("strategy = megatron", "backend = megatron", "megatron_config.tensor_model_parallel_size > 0"),
    without=("strategy = fsdp|fsdp2|ddp", "backend = fsdp|jax"),
    by_default={
        **ONE,
        **NO_DATASETS,
        "packed": True,
        "lora": False,
        "mtp": False,
        "recompute": True,
        "router-replay": False,
        "checkpoint": True,
        "per-token-loss": False,
        "distributed-optimizer": True,
        "offloaded-optimizer": False,
    },
    without_by_default=True,
    implied={"sp": "tp"},
)
