"""The order of messages between two pipeline stages that are each other's previous and next stage.

What is wrong (0.12 to main): with two pipeline ranks and virtual stages, `prev` and `next` are the same rank. A batch
of messages sends to prev and then to next, and receives from prev and then from next. Messages between two ranks find
each other by their order alone. So one rank sends a gradient to its previous stage, and the other rank receives it
from its own previous stage, as the activation that it waits for. Without `overlap_p2p_comm` the steady state of the
interleaved schedule has such batches:
- `batch_p2p_comm`, the default, crosses activations and gradients. That is silent if all have the same shape.
- `variable_seq_lengths` sends shapes in batches in any case. So they are crossed with `batch_p2p_comm=False` as well,
  whose tensors have the right order.
megatron.training refuses two pipeline ranks with virtual stages without `overlap_p2p_comm`. megatron-core does not.

What the patch does: if prev and next are the same rank, messages to next are sent first. There are as many messages
and batches as on stock, and no rank waits longer. With more than two pipeline ranks upstream gets the call as it is.

gloo pairs messages in the order of the calls. NCCL pairs those of one peer in the order of the calls within a group as
well, as its manual says, so it crosses the same batches. Only gloo was run. It ends the process if a shape is
crossed and a message is longer than its buffer; NCCL asks for equal counts, and does not promise an error.

What stays: with `variable_seq_lengths` and as many microbatches as pipeline ranks this schedule hangs, on two ranks as
on four. interleaved-shapes fixes that.

Upstream: pull requests 1495 and 5271 were closed; nothing is merged.

Delete when: batches of messages send to the next rank first, and releases before that are not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing

MODULE = "megatron.core.pipeline_parallel.p2p_communication"
BATCH = f"{MODULE}:_batched_p2p_ops"
FUNCTION = f"{MODULE}:_communicate_shapes"
METHOD = f"{MODULE}:P2PCommunicator._communicate_shapes"

Question = Callable[[tuple[Any, ...], Mapping[str, Any]], bool]  # of the arguments of a call


def _batched_p2p_ops(original: Function) -> Function:
    prev_of, next_of = argument(original, "prev_pipeline_rank"), argument(original, "next_pipeline_rank")
    return _next_first(original, lambda args, kwargs: bool(prev_of(args, kwargs) == next_of(args, kwargs)))


def _of_function(original: Function) -> Function:
    config_of = argument(original, "config")

    def has_one_neighbour(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        upstream = sys.modules[MODULE]
        prev_rank = upstream.get_pipeline_model_parallel_prev_rank()
        next_rank = upstream.get_pipeline_model_parallel_next_rank()
        return not config_of(args, kwargs).use_ring_exchange_p2p and prev_rank == next_rank

    return _next_first(original, has_one_neighbour)


def _of_method(original: Function) -> Function:
    def has_one_neighbour(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        communicator = args[0]
        return not communicator.config.use_ring_exchange_p2p and communicator.prev_rank == communicator.next_rank

    return _next_first(original, has_one_neighbour)


def _next_first(original: Function, has_one_neighbour: Question) -> Function:
    """Upstream's function, which sends to prev first, with what it sends to either side exchanged.

    Both sides are one rank, so each message goes where it went, in the other order. What is received stays.
    """
    to_prev_of, to_next_of = argument(original, "tensor_send_prev"), argument(original, "tensor_send_next")
    with_to_prev, with_to_next = replacing(original, "tensor_send_prev"), replacing(original, "tensor_send_next")

    @functools.wraps(original)
    def next_first(*args: Any, **kwargs: Any) -> Any:
        to_prev, to_next = to_prev_of(args, kwargs), to_next_of(args, kwargs)
        if to_prev is not None and to_next is not None and has_one_neighbour(args, kwargs):
            args, kwargs = with_to_prev(args, kwargs, to_next)
            args, kwargs = with_to_next(args, kwargs, to_prev)
        return original(*args, **kwargs)

    return next_first


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    shapes: dict[str, Callable[[Function], Function]]
    shapes = {FUNCTION: _of_function} if variant == "v0_12" else {METHOD: _of_method}
    return {BATCH: _batched_p2p_ops, **shapes}
