"""Algorithms on tensors, usable without megatron: the packed roll, on one rank and over context-parallel ranks."""

from shim.ops.context_parallel_roll import RankRollIndex, rank_roll_index, roll_on_rank
from shim.ops.packed_roll import RollIndex, packed_roll, roll_index, roll_with

__all__ = ["RankRollIndex", "RollIndex", "packed_roll", "rank_roll_index", "roll_index", "roll_on_rank", "roll_with"]
