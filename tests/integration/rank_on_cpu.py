"""A whole process of a trainer's command on a CPU: megatron-core, Transformer Engine and torch's names of a GPU.

Kernels are torch's, and messages are gloo's. The rest is the trainer's, megatron-core's and Transformer Engine's.
"""

import contextlib
import functools
import os
from importlib import import_module
from unittest import mock

import te_on_cpu
import torch
import torch.distributed as dist

from shim import testing
from shim.testing.cpu import type_on_a_gpu

_FOREVER = contextlib.ExitStack()
_GIBIBYTE = 2**30
# What trainers ask of a GPU, and print.
_ANSWERS = {
    "device_count": 8,
    "get_device_capability": (9, 0),
    "get_device_name": "CPU",
    "is_bf16_supported": True,
    "max_memory_allocated": 0,
    "max_memory_reserved": 0,
    "mem_get_info": (_GIBIBYTE, _GIBIBYTE),
    "memory_allocated": 0,
    "memory_reserved": 0,
    "empty_cache": None,
    "ipc_collect": None,
    "reset_peak_memory_stats": None,
    "set_device": None,
}


def importable():
    """Let the process import what trains, and ask for a GPU."""
    torch.set_num_threads(1)
    testing.transformer_engine_on_cpu()
    for name, answer in _ANSWERS.items():
        setattr(torch.cuda, name, functools.partial(_answer, answer))


def enter():
    """From here to the end of the process. Imports megatron-core, before which `shim run` applies shim."""
    importable()
    import megatron.core.extensions.transformer_engine as layers

    layers.TEDotProductAttention = testing.CPUCoreAttention  # before a trainer takes the name
    dist.init_process_group = functools.partial(_by_gloo, dist.init_process_group)
    dist.all_to_all_single = functools.partial(_by_lists, dist.all_to_all_single)
    for context in (
        testing.megatron_on_cpu(),
        testing.te_cuda_stand_ins(),
        testing.multi_tensor_ops(),
        te_on_cpu.te_modules_on_cpu(),
        te_on_cpu.te_modules_built(),
        te_on_cpu.routers_on_cpu(),
        te_on_cpu.products_on_cpu(),
        te_on_cpu.experts_on_cpu(),
        mock.patch.object(torch.Tensor, "type", type_on_a_gpu),
        mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None),
    ):
        _FOREVER.enter_context(context)
    for module in os.environ.get("SHIM_TEST_OF_THE_TRAINER", "").split():
        import_module(module)  # what one trainer needs beyond this


def _answer(answer, *arguments, **options):
    return answer


def _by_gloo(init_process_group, backend=None, *arguments, device_id=None, **options):
    return init_process_group("gloo", *arguments, **options)


def _by_lists(all_to_all_single, output, given, output_split_sizes=None, input_split_sizes=None, *arguments, **options):
    """megatron-core makes lists of the counts of a router only if they lie on a GPU."""
    sizes = (each.tolist() if hasattr(each, "tolist") else each for each in (output_split_sizes, input_split_sizes))
    return all_to_all_single(output, given, *sizes, *arguments, **options)
