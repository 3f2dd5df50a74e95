"""miles, a fork of slime. Whether it has the distributed optimizer depends on the optimizer."""

from shim._configs.trainers import Trainer, slime

TRAINER = Trainer(
    name="miles",
    marks=("use_miles_router", "megatron_to_hf_mode", "multi_lora_n_adapters", "lora_rank & rollout_batch_size"),
    programs=("miles",),
    fork_of="slime",
    settings=slime.SETTINGS,
    without=slime.TRAINER.without,
    by_default={word: holds for word, holds in slime.BY_DEFAULT.items() if word != "distributed-optimizer"},
)
