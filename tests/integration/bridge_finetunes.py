"""Megatron-Bridge's own `finetune()` of one of its recipes.

    torchrun bridge_finetunes.py finetune RECIPE MODEL WHERE OPTIONS

The recipe is made small, and trains a model of the disk on rows of the disk, from packing them to a checkpoint. With
"import" in the place of "finetune" the model is only written to WHERE, as the checkpoint that a recipe starts from.
"""

import json
import sys
from importlib import import_module
from pathlib import Path

import torch

ON_CPU = {
    "use_cpu_initialization": True,
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "cross_entropy_loss_fusion": False,
    "bf16": False,
    "seq_length": 256,
}


def set_all(target, values):
    for name, value in values.items():
        set_all(getattr(target, name), value) if type(value) is dict else setattr(target, name, value)


def configured(recipe, model, where, options):
    """The recipe's configuration, for three steps of two rows."""
    import datasets
    from megatron.bridge import AutoBridge

    of_the_hub = AutoBridge.from_hf_pretrained.__func__
    AutoBridge.from_hf_pretrained = classmethod(lambda cls, name, **given: of_the_hub(cls, str(model), **given))
    config = getattr(import_module(f"megatron.bridge.recipes.{recipe[0]}"), recipe[1])()
    rows = [json.loads(line)["messages"] for line in (model / "rows.jsonl").read_text().splitlines()]
    rows = [(row[0]["content"], {"text": [row[1]["content"]], "answer_start": [0]}) for row in rows]
    rows = datasets.Dataset.from_list([{"context": "", "question": asked, "answers": told} for asked, told in rows])
    (where / "data").mkdir(exist_ok=True)  # the other rank may be first
    every = {
        "model": ON_CPU | {"params_dtype": torch.float32},
        "tokenizer": {"tokenizer_model": str(model)},
        "dataset": {
            "seq_length": 256,
            "dataset_root": str(where / "data"),
            "dataset_dict": datasets.DatasetDict({"train": rows}),
            "packed_sequence_specs": {"packed_sequence_size": 256, "num_tokenizer_workers": 1},
            "num_workers": 0,
            "persistent_workers": False,
            "pin_memory": False,
        },
        "train": {"train_iters": 3, "global_batch_size": 2, "micro_batch_size": 1},
        "validation": {"eval_iters": 0},
        "optimizer": {"lr": 1e-3, "min_lr": 1e-3, "bf16": False, "params_dtype": torch.float32},
        "ddp": {"overlap_grad_reduce": False, "overlap_param_gather": False},
        "scheduler": {"lr_warmup_iters": 0, "lr_decay_iters": 3, "lr_decay_style": "constant"},
        "checkpoint": {"save": str(where / "saved"), "load": None},
        "logger": {"log_interval": 1, "tensorboard_dir": None},
    }
    set_all(config, every)
    config.mixed_precision = None
    set_all(config, options)
    return config


def write_checkpoint(config, model, where):
    from megatron.bridge import AutoBridge

    config.model.finalize()
    config.model.initialize_model_parallel(seed=0)
    torch.manual_seed(3)
    models = config.model.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    AutoBridge.from_hf_pretrained(str(model)).save_megatron_model(
        models, str(where / "checkpoint"), hf_tokenizer_path=str(model), low_memory_save=False
    )


def main(what, recipe, model, where, options):
    import megatron.core.datasets.utils as compiled

    compiled.compile_helpers = lambda: None  # needs a compiler, for data sets that are not read here
    config = configured(recipe.split(":"), Path(model), Path(where), json.loads(options))
    if what == "import":
        write_checkpoint(config, Path(model), Path(where))
    else:
        from megatron.bridge.training.finetune import finetune
        from megatron.bridge.training.gpt_step import forward_step

        finetune(config, forward_step)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
