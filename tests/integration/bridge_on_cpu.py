"""What Megatron-Bridge needs beside rank_on_cpu: packages that it imports and does not call here, and one operation."""

import itertools
import typing
from importlib import import_module

import absent
import torch
import transformer_engine_torch
import typing_extensions

_PACKAGES = (
    "megatron.bridge.diffusion",
    "megatron.energon",
    "modelopt",
    "nvidia_resiliency_ext",
    "torch.utils.tensorboard",
    "webdataset",
)


def thd_get_partitioned_indices(cu_seqlens, total_tokens, world_size, rank):
    """This context-parallel rank's tokens: of each sequence the chunks `rank` and 2 * world_size - 1 - rank of twice
    as many chunks as ranks."""
    ends, found = cu_seqlens.tolist(), []
    for start, end in itertools.pairwise(ends):
        part = (end - start) // (2 * world_size)
        for chunk in (rank, 2 * world_size - 1 - rank):
            found += range(start + chunk * part, start + (chunk + 1) * part)
    return torch.tensor(found, dtype=torch.int32)


import_module("megatron.core.dist_checkpointing.strategies.torch")  # asks for the version of one of them
absent.stand_in(*_PACKAGES)
# A schedule refuses a function that moves shapes for distillation, of which there is none.
import_module("modelopt.torch.distill.plugins.megatron").get_tensor_shapes_adjust_fn_for_distillation = (
    lambda *_, **__: None
)
typing.override = typing_extensions.override  # Python 3.12's
transformer_engine_torch.thd_get_partitioned_indices = thd_get_partitioned_indices
