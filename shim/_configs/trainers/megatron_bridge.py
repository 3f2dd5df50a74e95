"""Megatron-Bridge and NeMo: a.b=c, flags or YAML over a recipe in Python, from which the other values come."""

from shim._configs.settings import MEGATRON
from shim._configs.trainers import Trainer

TRAINER = Trainer(
    name="Megatron-Bridge",
    marks=(
        "model.tensor_model_parallel_size",
        "model.pipeline_model_parallel_size",
        "model.seq_length",
        "checkpoint.pretrained_checkpoint",
        "train.train_iters",
        "trainer.strategy.tensor_model_parallel_size",
        "dist.use_megatron_fsdp",
    ),
    programs=("run_recipe", "finetune_", "pretrain_", "setup_experiment", "megatron.bridge", "nemo llm", "run_script"),
    settings={
        "tp": (*MEGATRON["tp"], "tp > 1", "tensor_parallel > 1", "strategy.tensor_model_parallel_size > 1"),
        "cp": (*MEGATRON["cp"], "cp > 1"),
        "pp": (*MEGATRON["pp"], "pp > 1"),
        "ep": (*MEGATRON["ep"], "ep > 1"),
        "packed": (
            "enable_in_batch_packing",
            "enable_offline_packing",
            "packed_sequence",
            "packed_sequence_size > 0",
            "offline_packing_specs.packed_sequence_size > 0",
            "dataset.packing_buffer_size > 0",
            "pack_sequences_in_batch",
        ),
        "lora": (
            "peft_scheme",
            "peft",
            "peft.dim > 0",
            "mode = lora|dora",
            "task = lora|dora|peft",
            "freeze_language_model",
        ),
        "checkpoint": ("checkpoint.save", "checkpoint.load", "checkpoint.save_interval > 0", "save_dir", "load_dir"),
        "fp8": (*MEGATRON["fp8"], "mixed_precision ~ fp8|mxfp8|nvfp4", "compute_dtype ~ fp8|nvfp4", "fp8_recipe"),
        "muon": ("optimizer.optimizer ~ muon", "optimizer ~ muon"),
        "datasets": ("dataset.blend", "dataset.data_path", "data_path", "dataset.mock & dataset.split"),
    },
    sizes_from="its recipe",
)
