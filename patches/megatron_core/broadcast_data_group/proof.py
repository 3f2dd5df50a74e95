"""Proofs of broadcast-data-group."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shim.testing import Layout
from shim.testing.proof import Here, LacksFeatureError, proof

SHORTEST = 5


def row_of(rank: int) -> Tensor:
    """The tokens of a rank, [1, s]: each rank has a longer row than the one before."""
    return torch.arange(SHORTEST + 2 * rank)[None] + 100 * rank


def sent(row: Tensor | None, group: Any) -> Tensor:
    """What broadcast_data makes of the row over a group. Only its first rank has to have one."""
    from megatron.core import tensor_parallel

    if "tp_group" not in inspect.signature(tensor_parallel.broadcast_data).parameters:
        raise LacksFeatureError("broadcast_data of this release takes no group")
    data = None if row is None else {"tokens": row}
    tokens: Tensor = tensor_parallel.broadcast_data(["tokens"], data, torch.int64, tp_group=group)["tokens"]
    return tokens


def lost_on_rank() -> int:
    """Tokens that a rank misses of its row, which it sends over another group."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    row = row_of(dist.get_rank())
    try:
        tokens = sent(row, groups[dist.get_rank()])
    finally:
        dist.destroy_process_group(groups[dist.get_rank()])
    return row.numel() - int(torch.isin(row, tokens).sum())


def different_on_rank() -> bool:
    """Whether a rank gets something else than the row of rank 0 over a group of all ranks."""
    everyone = dist.new_group(list(range(dist.get_world_size())))
    try:
        tokens = sent(row_of(0) if dist.get_rank() == 0 else None, everyone)
    finally:
        dist.destroy_process_group(everyone)
    return not torch.equal(tokens, row_of(0))


@proof("{:.0f} tokens lost", right="every rank has its row", ranks=2)
def a_rank_of_its_own_keeps_its_row(here: Here) -> int:
    """`tensor_parallel.broadcast_data` cuts rows off if its `tp_group` is not the global group.

    To reproduce: initialise two tensor-parallel ranks, as a student has them. Its teacher has tensor-parallel size 1,
    so each rank sends the teacher's row over a group of that rank alone:
    `broadcast_data(["tokens"], {"tokens": row}, torch.int64, tp_group=alone)`. Rank 0 has 5 tokens, and rank 1 has 7.

    Rank 1 gets the first 5 of its 7 tokens, without an error. `broadcast_data` calls
    `_build_key_size_numel_dictionaries(keys, data)` without the group, so that sizes go over the global
    tensor-parallel group, and those of rank 0 hold on both ranks. Right would be to pass `tp_group` on. Seen
    since 0.13, which brought the argument.
    """
    return sum(here.run(lost_on_rank, layout=Layout(tp=here.world)))


@proof(
    "{:.0f} ranks with another row",
    right="every rank has the row of the first",
    ranks=2,
    defect="crash",
    crashes=r"^TypeError: 'NoneType' object is not subscriptable",
)
def a_group_that_spans_global_groups_gets_its_data(here: Here) -> int:
    """`tensor_parallel.broadcast_data` asks ranks for data that only the first rank of its `tp_group` has.

    To reproduce: initialise two ranks with context-parallel size 2 and tensor-parallel size 1, and send a row to both
    over a group of both: `broadcast_data(["tokens"], data, torch.int64, tp_group=both)`. On rank 1 `data` is None.

    Rank 1 raises a TypeError: sizes go over the global tensor-parallel group, of which it is the first rank, so it
    looks for the sizes of tensors that it does not have. Right would be to get sizes and tensors from rank 0. Seen
    since 0.13.
    """
    return sum(here.run(different_on_rank, layout=Layout(cp=here.world)))
