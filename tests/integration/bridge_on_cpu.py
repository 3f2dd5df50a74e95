"""What Megatron-Bridge needs beside rank_on_cpu: packages that it imports and does not call here, and one operation."""

import typing
from importlib import import_module

import absent
import transformer_engine_torch
import typing_extensions

from shim.patches.megatron_core._proof_mamba import own_tokens

_PACKAGES = (
    "megatron.bridge.diffusion",
    "megatron.energon",
    "modelopt",
    "nvidia_resiliency_ext",
    "torch.utils.tensorboard",
    "webdataset",
)


import_module("megatron.core.dist_checkpointing.strategies.torch")  # asks for the version of one of them
absent.stand_in(*_PACKAGES)
# A schedule refuses a function that moves shapes for distillation, of which there is none.
import_module("modelopt.torch.distill.plugins.megatron").get_tensor_shapes_adjust_fn_for_distillation = (
    lambda *_, **__: None
)
typing.override = typing_extensions.override  # Python 3.12's


def _own_tokens(offsets, *of_the_rank):
    """Megatron-Bridge fills offsets up with -1, which are no ends of sequences."""
    return own_tokens(offsets[offsets >= 0], *of_the_rank)


transformer_engine_torch.thd_get_partitioned_indices = _own_tokens
