"""What ranks have to agree on, gathered with one small collective."""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["is_rank_zero", "ranks_that_differ"]


def _distributed() -> Any:
    """torch.distributed where it is imported and initialised, else None; nothing is imported for the question."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def is_rank_zero() -> bool:
    """Whether this process speaks for all: rank 0, or a process without ranks."""
    distributed = _distributed()
    if distributed is not None:
        return distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def ranks_that_differ(digest: str, group: Any = None) -> str:
    """Name the ranks of `group` whose digest is not that of its first rank; "" where all agree or there is one."""
    distributed = _distributed()
    if distributed is None or distributed.get_world_size(group) == 1:
        return ""
    digests: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(digests, digest, group=group)
    odd = {rank: found for rank, found in enumerate(digests) if found != digests[0]}
    if not odd:
        return ""
    return f"rank 0 has {digests[0]}, " + ", ".join(f"rank {rank} has {found}" for rank, found in odd.items())
