"""The states of a weight in fp32 beside others in 16 bits, in checkpoints of the distributed optimizer.

What is wrong (0.12 to 0.20): a parameter group of the inner optimizer has the weights in fp32 first, and then main
weights of those in bf16 and fp16. `model_param_group_index_map`, by which states are saved and loaded, numbers the
weights of a group as they lie in the buffers. The buffer of bf16 is usually the first. So if a group has both, as with
an fp32 router or norm in a bf16 model, each of them gets the states and the main weight of another.
- If their sizes differ, saving a checkpoint raises in every format.
- If not, the checkpoint has them under wrong names. A resume under another layout trains with states of other weights.

The patch numbers the weights of a group as the optimizer has them. The optimizer's groups stay as they are, and so do
groups of one kind of weights. Megatron-FSDP does not use the numbers.

Not covered: a checkpoint that stock has written of weights that all have the same size. Stock loads it under the same
layout, and should for the last time.

Upstream: pull request 5835 is on the dev branch. It is open for main (issue 2777).

Delete when: megatron-core numbers the weights of a group as the optimizer has them, and the releases before that are
not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function

BUILD = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_optimizer_group_ranges"


def _build_optimizer_group_ranges(original: Function) -> Function:
    @functools.wraps(original)
    def _build_optimizer_group_ranges(*args: Any, **kwargs: Any) -> Any:
        numbers, groups = original(*args, **kwargs)
        for index, group in enumerate(groups):
            group["params"].sort(key=lambda weight: weight.dtype != torch.float32)  # else in their order
            for order, weight in enumerate(group["params"]):
                numbers[weight] = (index, order)
        return numbers, groups

    return _build_optimizer_group_ranges


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {BUILD: _build_optimizer_group_ranges}
