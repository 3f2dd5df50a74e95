"""AReaL: YAML whose parallel sizes stand in one string, as in backend: megatron:d4p2t2."""

from shim._configs.trainers import GENERATES, NO_DATASETS, ONE, Trainer

TRAINER = Trainer(
    name="AReaL",
    marks=("allocation_mode", "gconfig", "actor.mb_spec", "total_train_epochs & scheduling_spec"),
    programs=("areal", "examples/math/gsm8k_rl.py"),
    settings={
        "tp": ("allocation.t > 1",),
        "cp": ("allocation.c > 1",),
        "pp": ("allocation.p > 1",),
        "ep": ("allocation.e > 1",),
        "lora": ("use_lora",),
        "recompute": ("gradient_checkpointing",),
        "fp8": ("fp8_config.mode", "fp8_config.enabled"),
        "checkpoint": ("recover.mode = on|auto|fault|resume", "saver.freq_epochs > 0", "saver.freq_steps > 0"),
        "muon": ("optimizer.type ~ muon",),
        "distributed-optimizer": ("ddp.use_distributed_optimizer",),
        "fsdp": ("megatron.use_custom_fsdp",),
        "datasets": (),
    },
    left_out=(*GENERATES, "fsdp", "archon"),
    engines=("backend",),
    with_megatron=("backend ~ megatron", "allocation_mode ~ megatron"),
    without=("backend ~ fsdp|archon", "allocation_mode ~ fsdp|archon|sglang|vllm"),
    by_default={**ONE, **NO_DATASETS, "packed": True, "lora": False, "recompute": False, "mtp": False},
    implied={"sp": "tp"},
)
