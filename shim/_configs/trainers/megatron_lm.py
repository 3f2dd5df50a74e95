"""Megatron-LM: its own arguments, in a script, or below MODEL_ARGS of a test's YAML."""

from shim._configs.settings import MEGATRON
from shim._configs.trainers import ONE, Trainer

TRAINER = Trainer(
    name="Megatron-LM",
    marks=(
        "num_layers & hidden_size",
        "tensor_model_parallel_size & train_iters",
        "model_args",
        "use_mcore_models",
        "tokenizer_type",
        "train_samples",
    ),
    programs=("pretrain_gpt", "pretrain_", "train_rl", "megatron.training", "multimodal/train"),
    settings={
        "packed": (*MEGATRON["packed"], "rl_use_sequence_packing", "packing_seq_length > 0", "packing_buffer_size > 0"),
        "moe": (*MEGATRON["moe"], "!num_layers"),
        "mla": (*MEGATRON["mla"], "!num_layers"),
        "lora": ("freeze_lm", "freeze_language_model"),
        "fused-rope": ("!no_rope_fusion", "apply_rope_fusion"),
        "mamba": (*MEGATRON["mamba"], "spec ~ mamba"),
        "checkpoint": ("save", "load", "pretrained_checkpoint"),
        "datasets": ("data_path", "data_args_path", "train_data_path", "per_split_data_args_path", "mock_data"),
        "mrope": (*MEGATRON["mrope"], "use_mrope"),
        "fsdp": (*MEGATRON["fsdp"],),
    },
    left_out=("inference",),
    by_default={
        **ONE,
        "sp": False,
        "mtp": False,
        "recompute": False,
        "fp8": False,
        "lora": False,
        "per-token-loss": False,
        "distributed-optimizer": False,
        "offloaded-optimizer": False,
    },
)
