"""The group over which pipeline stages send the shapes of what they send.

What is wrong (0.12 to 0.15): with `variable_seq_lengths` pipeline stages send shapes before tensors. Shapes go over the
default group of torch.distributed, which has all ranks, and tensors over the pipeline group.
NCCL makes the communicator of a group in the first batch of messages over it, for which it waits for all ranks of the
group. That of the pipeline group is made for the first tensor, when ranks from the third stage on still wait for a
shape. So the first step hangs with more than two stages, unless something else has used the pipeline group before, or
communicators are made at once (`device_id`). ms-swift and slime have moved the tensors to the default group as well.

What the patch does: shapes are sent by upstream's `_batched_p2p_ops`, over the pipeline group, as from 0.16 on. If a
trainer has replaced that function by one with another group, shapes go where tensors go. There are as many messages and
batches as on stock. `use_ring_exchange_p2p` has the right group, and stays upstream's.

Upstream: fixed in 0.16 by commit 5b322e5f85.

Delete when: releases before 0.16 are not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shim.patches._arguments import Function, argument, takes

MODULE = "megatron.core.pipeline_parallel.p2p_communication"
FUNCTION = f"{MODULE}:_communicate_shapes"
METHOD = f"{MODULE}:P2PCommunicator._communicate_shapes"

DIMENSIONS = 3  # [s, b, h]


def _of_function(original: Function) -> Function:
    config_of = argument(original, "config")

    def neighbours(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
        upstream = sys.modules[MODULE]
        return (
            config_of(args, kwargs),
            upstream.get_pipeline_model_parallel_group(),
            upstream.get_pipeline_model_parallel_prev_rank(),
            upstream.get_pipeline_model_parallel_next_rank(),
        )

    return _communicate_shapes(original, neighbours, "config")


def _of_method(original: Function) -> Function:
    def neighbours(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
        communicator = args[0]
        return communicator.config, communicator.pp_group, communicator.prev_rank, communicator.next_rank

    return _communicate_shapes(original, neighbours, "self")


def _communicate_shapes(
    original: Function, neighbours: Callable[..., tuple[Any, Any, Any, Any]], *further: str
) -> Function:
    send_next_of, send_prev_of = argument(original, "tensor_send_next"), argument(original, "tensor_send_prev")
    recv_prev_of, recv_next_of = argument(original, "recv_prev"), argument(original, "recv_next")

    @functools.wraps(original)
    def _communicate_shapes(*args: Any, **kwargs: Any) -> Any:
        config, group, prev_rank, next_rank = neighbours(args, kwargs)
        # 0.12 has lists of groups, for encoders with another tensor-parallel size.
        if config.use_ring_exchange_p2p or isinstance(group, list):
            return original(*args, **kwargs)
        from_prev, from_next = _room(recv_prev_of(args, kwargs)), _room(recv_next_of(args, kwargs))
        works = sys.modules[MODULE]._batched_p2p_ops(
            tensor_send_prev=_shape(send_prev_of(args, kwargs)),
            tensor_recv_prev=from_prev,
            tensor_send_next=_shape(send_next_of(args, kwargs)),
            tensor_recv_next=from_next,
            group=group,
            prev_pipeline_rank=prev_rank,
            next_pipeline_rank=next_rank,
        )
        for work in works:
            work.wait()
        # As upstream does after batched messages.
        torch.cuda.synchronize()
        return _read(from_prev), _read(from_next)

    takes(_communicate_shapes, {"tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", *further})
    return _communicate_shapes


def _room(wanted: bool) -> Tensor | None:
    return torch.empty(DIMENSIONS, device=torch.cuda.current_device(), dtype=torch.int64) if wanted else None


def _shape(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return torch.tensor(tensor.size(), device=torch.cuda.current_device(), dtype=torch.int64)


def _read(received: Tensor | None) -> list[int]:
    return [0] * DIMENSIONS if received is None else received.tolist()


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {"v0_12": {FUNCTION: _of_function}, "v0_14": {METHOD: _of_method}}[variant]
