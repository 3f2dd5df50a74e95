"""Checkpoints of the distributed optimizer whose buckets do not reach all ranks.

What is wrong (0.15 to 0.20): with `distrib_optim_sharding_type` "dp_reshardable", which Megatron-LM's own training
takes, nothing can be saved, and nothing loaded, if a rank has no weight of some bucket: an AssertionError, "empty
bucket encountered". A rank has a share of each bucket. If weights are few or small, a share may lie behind the last
one or, on four ranks and more, between two: a bucket ends at a multiple of 128 elements, and a weight begins at one of
64. Small adapters, biases, and vectors in fp32 are such weights.

What the patch does: the rank then has an entry of padding in the bucket, like those that stock puts between weights.
Between weights it has the length of the share. Behind the last one it has the length 0, and only keeps the place in the
list, which a load asks for. The entry has the names and dtypes of the rank's other entries. Those of other buffers
serve without the precision-aware optimizer, which may keep weights of other dtypes in another way.

Not fixed: a rank without a weight in any bucket of this optimizer knows no names, and raises as on stock.

Upstream: pull request 6015 has commit dd2c0f6637, which names the error. It is neither on main nor on dev of 2026-08.

Delete when: a rank without a weight of a bucket can save and load upstream, and the releases before that are not
supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function

STATE = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.get_parameter_state_dp_reshardable"


def _get_parameter_state_dp_reshardable(original: Function) -> Function:
    @functools.wraps(original)
    def get_parameter_state_dp_reshardable(*args: Any, **kwargs: Any) -> Any:
        state = original(*args, **kwargs)
        optimizer = args[0]
        entries = [
            [bucket for buckets in state[n].values() for bucket in buckets] for n in range(len(optimizer.buffers))
        ]
        if not all(map(all, entries)):
            _fill(entries, optimizer)
        return state

    return get_parameter_state_dp_reshardable


def _fill(entries: list[list[list[dict[str, Any]]]], optimizer: Any) -> None:
    """Give each empty bucket an entry. entries: by buffer and bucket, those of this rank's weights."""
    group = optimizer.data_parallel_group
    firsts = [next((bucket[0] for bucket in buckets if bucket), None) for buckets in entries]
    other = None if optimizer.config.use_precision_aware_optimizer else next(filter(None, firsts), None)
    for buffer, buckets, first in zip(optimizer.buffers, entries, firsts, strict=True):
        like = first or other
        if like is None:
            continue
        for bucket, found in zip(buffer.buckets, buckets, strict=True):
            if not found:
                share = bucket.grad_data.numel() // group.size()
                found.append(_padding(like, share, bucket.numel_unpadded - group.rank() * share))


def _padding(like: Mapping[str, Any], share: int, left: int) -> dict[str, Any]:
    """An entry of padding. left: elements from the beginning of the share to the end of weights; may be negative."""
    start, length = (0, share) if left > 0 else (left, 0)
    # A step has no dimension, and is not saved here.
    tensors = {name: value.new_empty(length) for name, value in like.items() if torch.is_tensor(value) and value.dim()}
    return {**tensors, "gbuf_local_start": start, "gbuf_local_end": start + length, "padding": True}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {STATE: _get_parameter_state_dp_reshardable}
