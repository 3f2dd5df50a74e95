"""RLinf: YAML with a section for each role, and megatron's settings below its `model`. It trains packed rows."""

from shim._configs.trainers import GENERATES, NO_DATASETS, ONE, Trainer

TRAINER = Trainer(
    name="RLinf",
    marks=(
        "training_backend",
        "runner.task_type",
        "cluster.component_placement",
        "megatron.use_hf_ckpt",
        "rollout.rollout_backend",
        "lr_sched",
    ),
    programs=("rlinf",),
    settings={
        "packed": (),
        "lora": ("is_lora",),
        "checkpoint": ("runner.save_interval > 0", "runner.resume_dir"),
        "datasets": (),
    },
    left_out=(*GENERATES, "fsdp_config"),
    with_megatron=("training_backend = megatron",),
    without=("training_backend = fsdp",),
    by_default={
        **ONE,
        **NO_DATASETS,
        "packed": True,
        "lora": False,
        "mtp": False,
        "sp": False,
        "recompute": False,
        "fp8": False,
        "per-token-loss": False,
        "offloaded-optimizer": False,
    },
)
