"""LLaMA-Factory: YAML. It trains with megatron-core if its environment says so, or the YAML has megatron's sizes."""

from shim._configs.trainers import NO_DATASETS, ONE, Trainer

TRAINER = Trainer(
    name="LLaMA-Factory",
    marks=("finetuning_type", "cutoff_len", "stage & template", "dataset_dir & template"),
    programs=("llamafactory",),
    settings={
        "lora": ("finetuning_type = lora|freeze|oft",),
        "packed": ("packing", "neat_packing", "use_packed_sequences", "enable_in_batch_packing"),
        "recompute": ("recompute_granularity", "moe_layer_recompute"),
        "checkpoint": ("save_steps > 0", "resume_from_checkpoint"),
        "muon": ("use_muon",),
        "datasets": (),
    },
    with_megatron=(
        "use_mca",
        "tensor_model_parallel_size > 0",
        "pipeline_model_parallel_size > 0",
        "expert_model_parallel_size > 0",
        "use_distributed_optimizer",
    ),
    without=("fsdp", "fsdp_config", "deepspeed", "finetuning_type = lora|full|freeze|oft"),
    by_default={**ONE, **NO_DATASETS, "sp": False, "packed": False, "lora": False, "recompute": False, "mtp": False},
)
