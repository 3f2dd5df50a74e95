"""What ranks have to agree on, gathered with one small collective."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["NOTHING", "is_rank_zero", "ranks_that_differ"]

# Of int64: the digest, a hash of the ids, and one of each patch. The same on all ranks whatever they have, because a
# collective in which ranks send different sizes hangs.
SLOTS = 128
NOTHING = "nothing applied"  # in the place of a digest


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


def ranks_that_differ(digest: str, patches: Mapping[str, str], group: Any = None) -> str:
    """Name the ranks of `group` that differ from its first rank, and in which patches; "" where all agree.

    digest: of the plan.    patches: by id, what identifies the patch as applied here ("" where it is not).
    group: a process group of any backend; None is the default one, and no ranks where there is none.

    One all-gather of 1 kB per rank, on the device the backend of the group works on.
    """
    distributed = _distributed()
    if distributed is None:
        return ""
    size = distributed.get_world_size(group)
    if size < 2:  # alone, or not a member of the group (-1)
        return ""
    ids = sorted(patches)[: SLOTS - 2]
    mine = [_number(digest), _number(" ".join(ids)), *(_number(patches[id]) for id in ids)]
    rows = _gathered(distributed, mine + [0] * (SLOTS - len(mine)), size, group)
    # Of the world, as everybody counts them, not of the group.
    ranks = range(size) if group is None else distributed.get_process_group_ranks(group)
    said = [f"rank {rank} differs in {_what(rows[0], row, ids)}" for rank, row in zip(ranks, rows) if row != rows[0]]
    return f"{'; '.join(said)} (against rank {ranks[0]})" if said else ""


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _what(first: list[int], row: list[int], ids: list[str]) -> str:
    if _number(NOTHING) in (first[0], row[0]):
        return "whether anything was applied at all"
    if first[1] != row[1]:
        return "the patches it knows of (another release of shim, or another matrix)"
    names = [id for id, one, other in zip(ids, first[2:], row[2:]) if one != other]
    return ", ".join(names) or "its digest"


def _gathered(distributed: Any, mine: list[int], size: int, group: Any) -> list[list[int]]:
    torch = sys.modules["torch"]
    device = _device(torch, distributed, group)
    own = torch.tensor(mine, dtype=torch.int64, device=device)
    rows = [torch.empty_like(own) for _ in range(size)]
    distributed.all_gather(rows, own, group=group)
    return [row.tolist() for row in rows]


def _device(torch: Any, distributed: Any, group: Any) -> Any:
    """The device that the group can gather on: CPU where it can, so that no other device is set up for it."""
    chosen = group if group is not None else distributed.group.WORLD
    kinds = [device.type for device in getattr(chosen, "_device_types", ())]
    if not kinds:
        kinds = ["cuda"] if distributed.get_backend(group) == "nccl" else ["cpu"]
    if "cpu" in kinds:
        return torch.device("cpu")
    bound = getattr(chosen, "bound_device_id", None)
    if bound is not None:
        return bound
    accelerator = getattr(torch, kinds[0])
    # Before a trainer has chosen its device, the current one is 0 on every rank, which no backend takes twice.
    local = os.environ.get("LOCAL_RANK")
    if local is not None and not getattr(accelerator, "is_initialized", lambda: True)():
        # Where each process is shown one device of its own, that is number 0.
        return torch.device(kinds[0], int(local) % max(1, accelerator.device_count()))
    return torch.device(kinds[0], accelerator.current_device())
