"""State that the rolls of one model step share: the packed row and its index. Also the roll itself.

`THREAD.step` is the only ambient state of the patch, for two reasons: upstream's rolls do not get the row (up to 0.15),
and all rolls of a step share one index (all releases). The state belongs to the thread and ends with the step, so it
cannot be stale: neither for a buffer that the next step refills, nor for a graph that is captured with one row and
replayed with another.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, ones_like

from shim.ops.context_parallel_roll import RankRollIndex, rank_roll_index, roll_on_rank
from shim.ops.roll import RollIndex, roll_index, roll_with
from shim.patches._named import Named
from shim.patches.megatron_core._context_parallel_rows import group_of_row, is_parallel


class Step:
    """One model step.

    row: the PackedSeqParams of the step; None for an unpacked row.
    group: the context-parallel group, if the release does not pass one to the roll (0.12, 0.13).
    counts_divide: whether the caller divides by the count that a roll returns (up to 0.16).
    indices: (length, device, number of ranks) -> index of the row.
    """

    def __init__(self, row: Any = None, group: Any = None, counts_divide: bool = False) -> None:
        self.row = row
        self.group = group
        self.counts_divide = counts_divide
        self.indices: dict[tuple[int, torch.device, int], Any] = {}


class _Thread(Named, threading.local):
    """The step that this thread is in."""

    step: Step | None = None


THREAD = _Thread()


class in_step:
    """Enters a step on `row`. A nested step inherits missing arguments, and the indices if the row is the same.

    A class, because torch.compile with fullgraph=True does not accept a generator here.
    """

    def __init__(self, row: Any, group: Any = None, counts_divide: bool = False) -> None:
        self.step = Step(row, group, counts_divide)

    def __enter__(self) -> None:
        self.outer = outer = THREAD.step
        if outer is not None:
            self.step.group = outer.group if self.step.group is None else self.step.group
            self.step.counts_divide = self.step.counts_divide or outer.counts_divide
            if outer.row is self.step.row:
                self.step.indices = outer.indices
        THREAD.step = self.step

    def __exit__(self, *exception: object) -> None:
        THREAD.step = self.outer


def group_of(row: Any, cp_group: Any) -> Any:
    """The group that a row is cut over: the row's (dynamic context parallelism), else `cp_group`, else the step's."""
    group = group_of_row(row, cp_group)
    return THREAD.step.group if group is None and THREAD.step is not None else group


def index_of(row: Any, length: int, device: torch.device, group: Any, partition: str) -> RollIndex | RankRollIndex:
    """The index of this rank's share of `row`, computed at the first roll of a step and kept to its end."""
    if row.cu_seqlens_q is None:
        raise ValueError("packed_seq_params has no cu_seqlens_q, so the sequences of the row are not known")
    ranks = group.size() if is_parallel(group) else 1
    step = THREAD.step
    kept = step.indices if step is not None and row is step.row else {}
    key = (length, device, ranks)
    if key not in kept:
        lengths = row.cu_seqlens_q, row.cu_seqlens_q_padded
        if ranks == 1:
            kept[key] = roll_index(*lengths, length, device)
        else:
            kept[key] = rank_roll_index(*lengths, length, device, group.rank(), ranks, partition)
    return kept[key]


def roll_row(tensor: Tensor, shifts: int, dims: int, row: Any, group: Any, partition: str) -> Tensor:
    """Roll a packed row, or this rank's share of it."""
    if shifts != -1:
        raise ValueError(f"packed rows roll left by one (shifts=-1), not by {shifts}")
    index = index_of(row, tensor.size(dims), tensor.device, group, partition)
    if isinstance(index, RankRollIndex):
        return roll_on_rank(tensor, index, dims, group)
    return roll_with(tensor, index, dims)


def valid_tokens(like: Tensor, row: Any, group: Any, partition: str) -> Tensor:
    """A loss mask with the dtype and shape of `like`: one for valid tokens, zero on padding."""
    if row is None:
        return ones_like(like)
    index = index_of(row, like.size(-1), like.device, group, partition)
    return index.valid.to(like.dtype).expand_as(like)
