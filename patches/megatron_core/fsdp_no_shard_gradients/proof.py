"""Proof of fsdp-no-shard-gradients."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from shim.testing import Layout
from shim.testing.proof import CannotRunError, Here, proof

PLACES = ("fsdp.src.megatron_fsdp", "custom_fsdp")


def buffers_class() -> Any:
    for place in PLACES:
        try:
            module = import_module(f"megatron.core.distributed.{place}.param_and_grad_buffer")
        except ModuleNotFoundError:
            continue
        return module.ParamAndGradBuffer
    raise CannotRunError("this release has no Megatron-FSDP")


def reduced(**settings: Any) -> list[float]:
    """The gradients of a rank, which were its number plus one, after the sum over data-parallel ranks.

    settings: of DistributedDataParallelConfig, and async_op.
    """
    from megatron.core.distributed import DistributedDataParallelConfig

    asynchronous = settings.pop("async_op", False)
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    groups = [
        SimpleNamespace(
            main_grad_buffer=SimpleNamespace(
                data=torch.full((4,), rank + 1.0),
                gradient_scaling_factor=0.5,
                data_parallel_group=group,
                is_data_distributed=False,
            )
        )
        for _ in range(2)
    ]
    config = DistributedDataParallelConfig(**settings)
    config.outer_dp_sharding_strategy = "no_shard"
    config.gradient_reduce_div_fusion = False  # gloo has no sum with a factor
    buffers_class().all_reduce_gradients(SimpleNamespace(parameter_groups=groups, ddp_config=config), asynchronous)
    return [float(each.main_grad_buffer.data.mean()) for each in groups]


@proof("gradients off by {:.1f}", right="the mean of both ranks", ranks=2)
def ranks_that_shard_nothing_sum_their_gradients(here: Here) -> float:
    """Megatron-FSDP without sharding leaves each data-parallel rank its own gradients.

    To reproduce: on two ranks, call `ParamAndGradBuffer.all_reduce_gradients` with groups whose `main_grad_buffer` has
    `data` of 1 on the first rank and of 2 on the second, a `gradient_scaling_factor` of 0.5 and the group of both.

    The loop continues if there is a buffer, where it should if there is none. Right is 1.5 on both. In 0.12, and from
    0.14 to 0.17; 0.13 and 0.18 are right.
    """
    found = here.run(reduced, layout=Layout(ep=2))
    return max(abs(value - 1.5) for values in found for value in values)
