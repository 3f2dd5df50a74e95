"""AReaL's own engine for Megatron: three steps of SFT on a model of the disk, saved and loaded in the middle.

    torchrun areal_trains.py MODEL WHERE LAYOUT ORDER

Prints of each step its loss and norm. ORDER: "late" applies shim after AReaL was imported.
"""

import json
import sys
from pathlib import Path

import areal_on_cpu
import torch

import shim

STEPS = 3


def rows(model, tokenizer):
    """Batches of eight rows as its data set gives them: the words of the assistant are trained."""
    made = []
    for line in (model / "rows.jsonl").read_text().splitlines():
        asked, told = (message["content"] for message in json.loads(line)["messages"])
        prompt = tokenizer(asked)["input_ids"]
        ids = prompt + tokenizer(told)["input_ids"]
        ids += [tokenizer.eos_token_id] * (2 - len(ids) % 2)  # even: its routers see what fills a sequence up
        mask = [0] * len(prompt) + [1] * (len(ids) - len(prompt))
        made.append({"input_ids": torch.tensor([ids]), "loss_mask": torch.tensor([mask])})
    for row in made:
        row["attention_mask"] = torch.ones_like(row["input_ids"], dtype=torch.bool)
    return [made[8 * step : 8 * step + 8] for step in range(STEPS)]


def built(config, layout):
    from areal.api.alloc_mode import ParallelStrategy
    from areal.api.io_struct import FinetuneSpec
    from areal.engine.megatron_engine import MegatronLMEngine

    areal_on_cpu.use()
    engine = MegatronLMEngine(config)
    engine.create_process_group(ParallelStrategy(**layout))
    engine.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=8 * STEPS, train_batch_size=8))
    return engine


def configured(model):
    from areal.api.cli_args import MicroBatchSpec, OptimizerConfig, TrainEngineConfig

    optimizer = OptimizerConfig(lr=1e-3, warmup_steps_proportion=0.0, gradient_clipping=1.0)
    config = TrainEngineConfig(
        experiment_name="shim",
        trial_name="cpu",
        path=str(model),
        dtype="float32",
        optimizer=optimizer,
        mb_spec=MicroBatchSpec(n_mbs=1, max_tokens_per_mb=4096),
        backend="megatron:d1",
    )
    config.megatron.bridge_type = "megatron-bridge"
    return config


def saved_and_loaded(engine, where):
    """Its own checkpoint with the optimizer, into an engine whose weights were spoiled."""
    from areal.api.io_struct import SaveLoadMeta
    from megatron.core.dist_checkpointing.core import CheckpointingException

    (where / "saved").mkdir(exist_ok=True)
    meta = SaveLoadMeta(path=str(where / "saved"), weight_format="dcp", with_optim=True)
    try:
        engine.save(meta)
    except CheckpointingException as error:
        return f"not saved: {error}"
    with torch.no_grad():
        for weight in engine.model.parameters():
            weight.add_(1)
    engine.load(meta)
    return "saved and loaded"


def print_on_one(*words):
    if torch.distributed.get_rank() == 0:
        print(*words, flush=True)


def main(model, where, layout, order):
    if order == "late":
        import areal.engine.megatron_engine  # noqa: F401  (it patches megatron-core)

        shim.apply()
    model, where = Path(model), Path(where)
    engine = built(configured(model), json.loads(layout))
    if order == "late":
        shim.check(list(engine.model))
    ranks = engine.data_parallel_world_size
    for step, batch in enumerate(rows(model, engine.tokenizer)):
        if step == 1:
            print_on_one("checkpoint:", saved_and_loaded(engine, where))
        engine.train_lm([dict(row) for row in batch[engine.data_parallel_rank :: ranks]])
        told = engine.export_stats()
        print_on_one("step:", *(told[f"sft/{name}"] for name in ("loss/avg", "grad_norm")))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
