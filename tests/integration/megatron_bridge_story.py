"""What one process with Megatron-Bridge has to tell: its own LoRA around the output layer, on stock and under shim.

The package's __init__ wants all of Hugging Face, and its LoRA.transform wants megatron.training, which wants Python
3.12. So its two files of adapters are imported alone, and put around the layer as LoRA.transform does it.
"""

import contextlib
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
import trainers
from linear_loss_cases import ID, build, logits_counted, off_by, patched, step
from te_on_cpu import te_modules_on_cpu

import shim
from shim import testing

LAYOUTS = {"one rank": {}, "TP": {"tp": 2}, "SP": {"tp": 2, "sequence_parallel": True}}


def import_lora():
    """Its wrapper of a layer, and its adapter."""
    where = Path(find_spec("megatron.core").origin).parents[1]
    assert not (where / "__init__.py").exists()  # so that megatron is a package of several directories
    for name in ("megatron.bridge", "megatron.bridge.peft", "megatron.bridge.utils"):
        package = ModuleType(name)
        package.__path__ = [str(path) for path in _directories(name) if path.exists()]
        assert package.__path__
        sys.modules[name] = package
    layers, adapters = import_module("megatron.bridge.peft.lora_layers"), import_module("megatron.bridge.peft.utils")
    return layers.LoRALinear, adapters.ParallelLinearAdapter


def _directories(name):
    import megatron

    return [Path(root, *name.split(".")[1:]) for root in megatron.__path__]


def adapted(wrapper, adapter, dropout=0.0, frozen=True, **options):
    """A model with Megatron-Bridge's adapter around its output layer, the same in every call and on every rank."""
    model = build(1, **options)
    torch.manual_seed(3)
    base = model.output_layer
    made = adapter(
        base.input_size,
        base.output_size,
        4,
        base_linear_name="output_layer",
        activation="identity",
        row_init_method="normal",
        dropout=dropout,
        model_parallel_config=base.config,
        alpha=6,
        disable_sequence_parallel_comm=not base.config.sequence_parallel,
    )
    model.output_layer = wrapper(base, made)
    base.weight.requires_grad_(not frozen)
    return model


def tell(where):
    classes = import_lora()
    trainers.join()
    layout = testing.Layout(**LAYOUTS[where])
    told = {}
    on_cpu = testing.megatron_on_cpu(), testing.te_cuda_stand_ins(), te_modules_on_cpu()
    with contextlib.ExitStack() as stack:
        for each in (*on_cpu, testing.layout_initialised(layout)):
            stack.enter_context(each)
        calls = stack.enter_context(logits_counted())
        for name, options in (("frozen", {}), ("trained", {"frozen": False}), ("dropout", {"dropout": 0.5})):
            found, made = [], []
            for fused in (False, True):
                calls.clear()
                model = adapted(*classes, **options, sequence_parallel=layout.sequence_parallel)
                torch.manual_seed(5)
                with patched() if fused else shim.patched(only=[]):
                    found.append(step(model))
                    state = shim.check(model)[ID].state if fused else ""
                made.append(len(calls))
            told[name] = {"off": off_by(found[1], found[0]), "logits": made, "state": state}
            told[name]["classes"] = [type(part).__module__ for part in (model.output_layer, model.output_layer.adapter)]
    return told
