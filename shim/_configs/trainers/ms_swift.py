"""ms-swift: arguments of `megatron sft`, as flags or as YAML. `swift sft` trains without megatron."""

from shim._configs.trainers import NO_DATASETS, ONE, Trainer

TRAINER = Trainer(
    name="ms-swift",
    marks=("tuner_type", "train_type", "load_from_cache_file", "padding_free", "rlhf_type", "split_dataset_ratio"),
    programs=("swift", "megatron sft", "megatron pt", "megatron rlhf"),
    settings={
        "lora": ("tuner_type = lora|adalora|longlora|lora_llm", "train_type = lora|adalora|longlora", "freeze_llm"),
        "packed": ("packing", "padding_free"),
        "router-replay": ("router_replay_mode = r2|r3", "moe_enable_routing_replay"),
        "recompute": ("recompute_granularity = full|selective", "moe_layer_recompute"),
        "fused-rope": ("apply_rope_fusion",),
        "checkpoint": ("save_steps > 0", "save_interval > 0", "mcore_adapter", "mcore_model", "load"),
        "param-groups": ("vit_lr", "aligner_lr"),
        "datasets": (),
    },
    left_out=("vllm_engine_kwargs", "engine_kwargs"),
    with_megatron=("program ~ megatron", "tensor_model_parallel_size > 0", "expert_model_parallel_size > 0"),
    without=("program ~ swift sft|swift pt|swift rlhf|swift/cli/sft|swift/cli/rlhf|swift/cli/pt|swift sample",),
    by_default={
        **ONE,
        **NO_DATASETS,
        "sp": False,
        "packed": True,
        "mtp": False,
        "recompute": True,
        "router-replay": False,
        "distributed-optimizer": True,
        "offloaded-optimizer": False,
    },
)
