"""Tensor algorithms without megatron: packing, packed rolls, log-probabilities, rotary rows, paged stashes."""

from shim.ops.alignment import fp8_alignment
from shim.ops.context_parallel_roll import RankRollIndex, rank_roll_index, roll_on_rank
from shim.ops.logprob import Largest, LowRank, TokenLogprobs, linear_token_logprobs, token_logprobs
from shim.ops.packed_logprob import PackedLogprobs, linear_packed_logprobs, packed_logprobs
from shim.ops.packed_roll import RollIndex, packed_roll, roll_index, roll_with
from shim.ops.packing import Packing, pack_thd, unpack_thd
from shim.ops.paged_stash import PagedStash, PoolUse, StashOverflowError, StashStatistics
from shim.ops.rope import thd_freqs

__all__ = [
    "Largest",
    "LowRank",
    "PackedLogprobs",
    "Packing",
    "PagedStash",
    "PoolUse",
    "RankRollIndex",
    "RollIndex",
    "StashOverflowError",
    "StashStatistics",
    "TokenLogprobs",
    "fp8_alignment",
    "linear_packed_logprobs",
    "linear_token_logprobs",
    "pack_thd",
    "packed_logprobs",
    "packed_roll",
    "rank_roll_index",
    "roll_index",
    "roll_on_rank",
    "roll_with",
    "thd_freqs",
    "token_logprobs",
    "unpack_thd",
]
