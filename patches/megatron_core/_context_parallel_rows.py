"""The context-parallel group of a row, and the roll of an unpacked row. For mtp-packed-sequences and mtp-loss-cp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim.ops.context_parallel_roll import rank_roll_index, roll_on_rank


def is_parallel(group: Any) -> bool:
    return group is not None and group.size() > 1


def group_of_row(row: Any, cp_group: Any) -> Any:
    """The group that a row is cut over: the packed row's own (dynamic context parallelism), else `cp_group`."""
    group = getattr(row, "cp_group", None)
    return cp_group if group is None else group


def context_parallel_group() -> Any:
    """The group of parallel_state; None before it is initialised."""
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group() if parallel_state.is_initialized() else None


def roll_unpacked_on_rank(tensor: Tensor, dims: int, group: Any) -> Tensor:
    """Roll this rank's share of an unpacked row, cut by zigzag, for releases whose roll takes no group."""
    length, ranks = tensor.size(dims), group.size()
    whole = torch.arange(2, device=tensor.device, dtype=torch.int32) * (length * ranks)  # one sequence over all shares
    return roll_on_rank(tensor, rank_roll_index(whole, None, length, tensor.device, group.rank(), ranks), dims, group)
