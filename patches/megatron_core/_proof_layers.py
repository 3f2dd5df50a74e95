"""How a layer of attention trains, and how far tensors by name are from the right ones, for proofs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shim.testing.oracle import worst

__all__ = ["largest_error", "train_layer"]


def train_layer(layer: Any, shape: Sequence[int], *, steps: int, rate: float) -> None:
    """Train a layer of attention in place: its passes, finalize_model_grads, and a step of SGD, some times.

    layer: takes hidden states [s, b, h] and no mask, and returns its output first. shape: s, b and h of the whole; a
    rank takes its share under sequence parallelism. rate: the learning rate. The loss is a random sum of the output.
    Both are the same on all ranks, and for every number of them.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    model = DistributedDataParallel(layer.config, DistributedDataParallelConfig(), layer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        hidden, weights = (torch.randn(*shape, generator=generator) for _ in "hw")
        if layer.config.sequence_parallel:
            size = parallel_state.get_tensor_model_parallel_world_size()
            rank = parallel_state.get_tensor_model_parallel_rank()
            hidden, weights = (whole.chunk(size)[rank] for whole in (hidden, weights))
        model.zero_grad_buffer()
        (model(hidden, None)[0] * weights).sum().backward()
        finalize_model_grads([model])
        with torch.no_grad():
            for weight in layer.parameters():
                weight -= rate * weight.main_grad


def largest_error(found: Mapping[str, Tensor], right: Callable[[str], Tensor]) -> float:
    """The largest error of tensors, each by its norm over that of the right tensor; NaN if any is NaN.

    right: gives the tensor that is right for a name.
    """
    return worst({name: float((mine - right(name)).norm() / right(name).norm()) for name, mine in found.items()})
