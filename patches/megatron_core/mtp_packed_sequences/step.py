"""What the rolls of one model step share: the packed row they are on, its index, and the roll itself.

The scope belongs to the thread and ends with the step, so nothing in it can be stale: neither a buffer that is filled
anew for the next step, nor a graph that is captured with one row and replayed with another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shim.ops.context_parallel_roll import RankRollIndex, rank_roll_index, roll_on_rank
from shim.ops.packed_roll import RollIndex, roll_index, roll_with


class _Step(threading.local):
    """What rolls and layers of the model step that this thread is in have to know without being told."""

    row: Any = None  # the PackedSeqParams of the step
    group: Any = None  # its context-parallel group, where the release does not pass one
    indices: dict[tuple[int, torch.device, int], Any] | None = None  # of the row; gone with the step
    handed: Any = None  # the PackedSeqParams that an MTP layer, told of none, has to hand to its transformer layer
    counts_divide: bool = False  # the caller divides by the count that a roll returns
    normaliser: Any = None  # the GlobalNormaliser that rolls the loss mask


STEP = _Step()


class Scope:
    """Sets fields of STEP for a region and restores them, also under exceptions."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def __enter__(self) -> None:
        self.before = {name: getattr(STEP, name) for name in self.fields}
        for name, value in self.fields.items():
            setattr(STEP, name, value)

    def __exit__(self, *exception: object) -> None:
        for name, value in self.before.items():
            setattr(STEP, name, value)


def step_of(row: Any, **fields: Any) -> Scope:
    """The scope of a model step. One that is open for the same row already keeps its indices."""
    if STEP.row is row and STEP.indices is not None:
        return Scope(**fields)
    return Scope(row=row, indices={}, **fields)


def take_handed(given: Any) -> Any:
    """The row that was given, else the one the MTP layer hands on, once."""
    if given is not None:
        return given
    handed, STEP.handed = STEP.handed, None
    return handed


def is_parallel(group: Any) -> bool:
    return group is not None and group.size() > 1


def group_of(row: Any, cp_group: Any) -> Any:
    """The group a row is cut over: its own (dynamic context parallelism), else the one passed, else the step's."""
    for group in (getattr(row, "cp_group", None), cp_group):
        if group is not None:
            return group
    return STEP.group


def index_of(row: Any, length: int, device: torch.device, group: Any, partition: str) -> RollIndex | RankRollIndex:
    """The index of this rank's share of `row`, computed at the first roll of a step and kept to its end."""
    if row.cu_seqlens_q is None:
        raise ValueError("packed_seq_params has no cu_seqlens_q, so the sequences of the row are not known")
    ranks = group.size() if is_parallel(group) else 1
    kept = STEP.indices if STEP.indices is not None and row is STEP.row else {}
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


def roll_unpacked_on_rank(tensor: Tensor, dims: int, group: Any) -> Tensor:
    """Roll this rank's share of an unpacked row, cut by zigzag; for releases that know no group."""
    return roll_on_rank(tensor, unpacked_index(tensor.size(dims), tensor.device, group), dims, group)


def unpacked_index(length: int, device: torch.device, group: Any) -> RankRollIndex:
    """The index of this rank's share of an unpacked row: one sequence as long as all shares together."""
    whole = _whole(length, device, group)
    return rank_roll_index(whole, None, length, device, group.rank(), group.size())


def whole_row(length: int, device: torch.device, group: Any) -> Any:
    """An unpacked row, of which this rank has `length` tokens, as a packed row of one sequence."""
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=_whole(length, device, group))


def _whole(length: int, device: torch.device, group: Any) -> Tensor:
    return torch.arange(2, device=device, dtype=torch.int32) * (length * group.size())


class GlobalNormaliser:
    """Counts of targets over all context-parallel ranks, one per MTP depth, from one all-reduce.

    Every release divides the MTP loss by the rank's own count and then averages over ranks, which biases it where
    ranks count differently. Dividing by the share, (count over all ranks) / ranks, makes that average the mean over all
    targets.

    From 0.17 on (`clamps`) callers raise counts below one to one, which a share can be. They get the count over all
    ranks instead, and masks that are `ranks` times as large. What they multiply per-token losses with is the sum of the
    mask before the first roll: there they get a mask with the share as its sum, on whichever place, since a rank
    without targets before that roll can have some after it.
    """

    def __init__(
        self, mask: Tensor, index: Any, config: Any, group: Any, clamps: bool = False, derived_labels: bool = False
    ) -> None:
        # After k rolls those targets are left whose place in their sequence is k or more. Labels that are derived from
        # the input take one roll of the mask more.
        depths = config.mtp_num_layers + derived_labels
        counted = mask.double() * index.valid
        counts = torch.stack([(counted * (index.in_sequence >= k)).sum() for k in range(depths + 1)])
        torch.distributed.all_reduce(counts, group=group)
        self._counts, self._shares = counts.float(), (counts / group.size()).float()
        self._ranks, self._clamps = group.size(), clamps
        self._before_labels_roll = int(derived_labels)
        self._rolls, self._mask = 0, mask
        self.mask = self._shown()

    def roll(self, tensor: Tensor, roll: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """What a roll of `tensor` returns: the rolled loss mask and its count over all ranks, or any other tensor's."""
        if tensor is not self.mask:
            return roll(tensor)
        self._mask, _ = roll(self._mask)
        self._rolls += 1
        self.mask = self._shown()
        return self.mask, (self._counts if self._clamps else self._shares)[self._rolls]

    def _shown(self) -> Tensor:
        """The loss mask as the caller gets it."""
        if not self._clamps:
            return self._mask
        if self._rolls != self._before_labels_roll:
            return self._mask * self._ranks
        shown = torch.zeros_like(self._mask, dtype=torch.float32)
        shown.view(-1)[:1] = self._shares[self._rolls]
        return shown
