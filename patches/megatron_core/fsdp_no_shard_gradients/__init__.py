"""Gradients of Megatron-FSDP with data_parallel_sharding_strategy="no_shard".

What is wrong (0.12, 0.14 to 0.17): "no_shard" is the default of DistributedDataParallelConfig. `all_reduce_gradients`,
which start_grad_sync calls then, leaves out each group that has a buffer of gradients, by a test the wrong way round.
So every data-parallel rank steps with the gradients of its own rows, in silence, and the copies of the model drift
apart. A group without a buffer, as a frozen one, raises an AttributeError.

The patch lets upstream's function check that nothing is sharded, and sums the buffers itself, by the scale and group of
each, as 0.13 and 0.18 do.

Not covered: the distribution megatron-fsdp. shim patches megatron.core alone.

Upstream: right in 0.13, and from 0.18 on (Megatron-LM pull request 3754).

Delete when: megatron-core 0.17 is not supported.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from shim.patches._arguments import Function, argument

NAME = "param_and_grad_buffer:ParamAndGradBuffer.all_reduce_gradients"
CUSTOM = "megatron.core.distributed.custom_fsdp." + NAME
FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp." + NAME


def _all_reduce_gradients(original: Function) -> Function:
    asynchronous = argument(original, "async_op")

    @functools.wraps(original)
    def all_reduce_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        view = copy.copy(self)
        view.parameter_groups = [group for group in self.parameter_groups if group.main_grad_buffer is not None]
        original(view, *args, **kwargs)  # leaves out all of these
        module, config = sys.modules[original.__module__], self.ddp_config
        works = []
        for group in view.parameter_groups:
            buffer = group.main_grad_buffer
            if getattr(config, "check_for_nan_in_grad", False) and hasattr(module, "_check_nan_in_grad"):
                module._check_nan_in_grad(buffer.data)
            kind = module.gradient_reduce_preprocessing(buffer.data, buffer.gradient_scaling_factor, config)
            works.append(
                dist.all_reduce(
                    buffer.data,
                    op=kind,
                    group=buffer.data_parallel_group,
                    async_op=asynchronous((self, *args), kwargs),
                )
            )
        for work in works:
            if work is not None:
                work.wait()

    return all_reduce_gradients


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {CUSTOM if variant == "v0_12" else FSDP: _all_reduce_gradients}
