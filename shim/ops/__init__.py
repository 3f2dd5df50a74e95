"""Tensor algorithms without megatron: packing, packed rolls, log-probabilities, rotary rows, paged stashes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shim.ops.alignment import fp8_alignment
    from shim.ops.context_parallel_roll import RankRollIndex, rank_roll_index, roll_on_rank
    from shim.ops.logprob import Largest, LowRank, TokenLogprobs, linear_token_logprobs, token_logprobs
    from shim.ops.packed_logprob import PackedLogprobs, linear_packed_logprobs, packed_logprobs
    from shim.ops.packing import Packing, pack_thd, unpack_thd
    from shim.ops.paged_stash import PagedStash, PoolUse, StashOverflowError, StashStatistics
    from shim.ops.roll import RollIndex, packed_roll, roll_index, roll_with
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

_HOMES = {
    **dict.fromkeys(("fp8_alignment",), "shim.ops.alignment"),
    **dict.fromkeys(("RankRollIndex", "rank_roll_index", "roll_on_rank"), "shim.ops.context_parallel_roll"),
    **dict.fromkeys(
        ("Largest", "LowRank", "TokenLogprobs", "linear_token_logprobs", "token_logprobs"), "shim.ops.logprob"
    ),
    **dict.fromkeys(("PackedLogprobs", "linear_packed_logprobs", "packed_logprobs"), "shim.ops.packed_logprob"),
    **dict.fromkeys(("RollIndex", "packed_roll", "roll_index", "roll_with"), "shim.ops.roll"),
    **dict.fromkeys(("Packing", "pack_thd", "unpack_thd"), "shim.ops.packing"),
    **dict.fromkeys(("PagedStash", "PoolUse", "StashOverflowError", "StashStatistics"), "shim.ops.paged_stash"),
    **dict.fromkeys(("thd_freqs",), "shim.ops.rope"),
}


def __getattr__(name: str) -> Any:
    # At the first use: patches take one module each, and all of them are 11 ms of every start.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
