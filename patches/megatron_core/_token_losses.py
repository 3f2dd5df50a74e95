"""The vocab-parallel cross entropy of shim.ops, for the patches that replace upstream's with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim import ops
from shim._torch_names import outside_graph

__all__ = ["token_losses"]

NO_TARGET = -100


def token_losses(logits: Tensor, target: Tensor, group: Any, label_smoothing: float = 0.0) -> Tensor:
    """The loss of each token, [s, b] in fp32, from logits [s, b, V / TP] in any floating dtype."""
    if torch.compiler.is_compiling():
        outside: Tensor = _losses_outside_graph(logits, target, group, label_smoothing)
        return outside
    from shim.ops._logprob_small import is_small, small_token_losses  # here: a start needs none of it

    label_smoothing = max(label_smoothing, 0.0)  # stock ignores a label_smoothing below zero
    if (group is None or group.size() == 1) and label_smoothing < 1 and is_small(logits, target):
        return small_token_losses(logits, target, label_smoothing).float()
    found = ops.token_logprobs(
        logits,
        target.masked_fill(target < 0, NO_TARGET),
        tp_group=group,
        label_smoothing=label_smoothing,
        ignore_index=NO_TARGET,
        inplace_backward=_may_be_overwritten(logits),
    )
    return -found.logprob.float()


# Outside the graph, because token_losses reads values on CPU and branches on the number of logits. The first call
# imports dynamo.
_losses_outside_graph = outside_graph(token_losses)


def _may_be_overwritten(logits: Tensor) -> bool:
    # Stock overwrites logits in fp32 only. There a separate gradient would need more memory than stock does.
    memory = logits._base if logits._is_view() else logits
    return logits.dtype == torch.float32 and not (memory is not None and memory.is_leaf and memory.requires_grad)
