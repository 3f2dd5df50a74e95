"""Compares what ranks have applied, with one small collective."""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

__all__ = ["NOTHING", "OWN_CODE", "PACKAGES", "PARTS", "distributed_rank", "is_rank_zero", "ranks_that_differ"]

# The parts of a patch that are compared, each by 16 bits of the patch's slot, with the words for each in messages.
PARTS = {"variant": "variant", "fingerprints": "upstream's bodies", "options": "options", "code": "its code"}
# Releases are compared by a hash. Their text is also sent, so that messages can name them.
OWN_CODE, PACKAGES = "shim's own code", "files of packages"
NAMES = ("megatron-shim", "megatron-core", "transformer-engine", "torch", "the matrix", OWN_CODE, PACKAGES)
TEXT = 3  # slots, of 8 bytes
HEAD = 2 + len(NAMES) * (1 + TEXT)
# What foreign objects leave of a patch on a rank, with the words for each; one byte for each patch.
EFFECTS = {"": "in force", "conflict": "in conflict", "failed": "failed", "in part": "in force in part"}
# Slots of int64: the digest, a hash of the ids, the releases, one slot for each patch, and the effects. The number is
# fixed, because a collective in which ranks send different sizes hangs.
SLOTS = 160
PATCHES = (SLOTS - HEAD) * 8 // 9
NOTHING = "nothing applied"  # instead of a digest


def _distributed() -> Any:
    """torch.distributed if it is imported and initialised, else None. Imports nothing."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def distributed_rank() -> int | None:
    """The rank in torch.distributed, or None if it is not initialised."""
    distributed = _distributed()
    return None if distributed is None else int(distributed.get_rank())


def is_rank_zero() -> bool:
    """Whether this process logs for all ranks: rank 0, or a process without ranks."""
    rank = distributed_rank()
    return rank == 0 if rank is not None else os.environ.get("RANK", "0") == "0"


def ranks_that_differ(
    digest: str,
    patches: Mapping[str, Sequence[str]],
    releases: Mapping[str, str | None],
    group: Any = None,
    effects: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The ranks of `group` that differ from its first rank, and in which parts, in words; "" if all agree.

    digest: that of the plan.    releases: name (of NAMES) -> release, for what is installed.
    patches: id -> the parts of the patch as applied here, in the order of PARTS; empty if it is not applied.
    effects: id -> one of EFFECTS; "" for a patch that is not named.
    group: a process group of any backend. None is the default group; without one there are no ranks.

    Costs one all-gather of 1.3 kB per rank, on the device of the group's backend.
    """
    distributed = _distributed()
    if distributed is None:
        return ""
    size = distributed.get_world_size(group)
    if size < 2:  # alone, or not a member of the group (-1)
        return ""
    ids = sorted(patches)[:PATCHES]
    mine = [_number(digest), _number(" ".join(ids))]
    for name in NAMES:
        mine += _as_slots(releases.get(name))
    mine += [_of_parts(patches[id]) for id in ids] + _of_effects([effects.get(id, "") for id in ids])
    rows = _gathered(distributed, mine + [0] * (SLOTS - len(mine)), size, group)
    # Ranks are numbered as in the world, not as in the group.
    ranks = range(size) if group is None else distributed.get_process_group_ranks(group)
    said = [f"rank {rank} differs in {_what(rows[0], row, ids)}" for rank, row in zip(ranks, rows) if row != rows[0]]
    return f"{'; '.join(said)} (against rank {ranks[0]})" if said else ""


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _as_slots(text: str | None) -> list[int]:
    """A hash of the text and its first letters; zeros for None."""
    if text is None:
        return [0] * (1 + TEXT)
    letters = text.encode()[: 8 * TEXT].ljust(8 * TEXT, b"\0")
    return [_number(text), *struct.unpack(f"<{TEXT}q", letters)]


def _as_text(slots: list[int]) -> str:
    letters = struct.pack(f"<{TEXT}q", *slots[1:]).rstrip(b"\0")
    return letters.decode(errors="replace") or "none"


def _of_parts(parts: Sequence[str]) -> int:
    """One number with 16 bits for each part; 0 without parts."""
    bits = [(_number(part) & 0xFFFF) or 1 for part in parts[: len(PARTS)]]
    (number,) = struct.unpack("<q", struct.pack("<4H", *bits, *[0] * (len(PARTS) - len(bits))))
    return int(number)


def _of_effects(effects: Sequence[str]) -> list[int]:
    """Numbers with one byte for each effect."""
    numbers = bytes(list(EFFECTS).index(effect) for effect in effects)
    numbers = numbers.ljust(-(-len(numbers) // 8) * 8, b"\0")
    return list(struct.unpack(f"<{len(numbers) // 8}q", numbers))


def _effects_in(slots: list[int], count: int) -> list[str]:
    """The effects that `_of_effects` has put into slots, in words."""
    numbers = struct.pack(f"<{len(slots)}q", *slots)[:count]
    return [list(EFFECTS.values())[number] for number in numbers]


def _what(first: list[int], row: list[int], ids: list[str]) -> str:
    if _number(NOTHING) in (first[0], row[0]):
        return "whether anything was applied at all"
    found = []
    for place, name in enumerate(NAMES):
        one, other = (side[2 + place * (1 + TEXT) :][: 1 + TEXT] for side in (first, row))
        if one != other:
            found.append(f"{name} ({_as_text(other)}, not {_as_text(one)})")
    if first[1] != row[1]:
        return ", ".join([*found, "the patches it knows of (another release of shim, or another matrix)"])
    found += [f"{id} ({_parts(one, other)})" for id, one, other in zip(ids, first[HEAD:], row[HEAD:]) if one != other]
    sides = (_effects_in(side[HEAD + len(ids) :], len(ids)) for side in (first, row))
    found += [f"{id} ({other}, not {one})" for id, one, other in zip(ids, *sides) if one != other]
    return ", ".join(found) or "its digest"


def _parts(one: int, other: int) -> str:
    if 0 in (one, other):
        return "not applied" if other == 0 else "applied"
    sides = [struct.unpack("<4H", struct.pack("<q", side)) for side in (one, other)]
    return ", ".join(words for words, a, b in zip(PARTS.values(), *sides) if a != b)


def _gathered(distributed: Any, mine: list[int], size: int, group: Any) -> list[list[int]]:
    torch = sys.modules["torch"]
    device = _device(torch, distributed, group)
    own = torch.tensor(mine, dtype=torch.int64, device=device)
    rows = [torch.empty_like(own) for _ in range(size)]
    distributed.all_gather(rows, own, group=group)
    return [row.tolist() for row in rows]


def _device(torch: Any, distributed: Any, group: Any) -> Any:
    """A device that the group can gather on: CPU if possible, so that no other device is initialised."""
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
    # Before a trainer chooses its device, the current device is 0 on every rank, and no backend accepts one twice.
    local = os.environ.get("LOCAL_RANK")
    if local is not None and not getattr(accelerator, "is_initialized", lambda: True)():
        # If each process sees only one device, that device is number 0.
        return torch.device(kinds[0], int(local) % max(1, accelerator.device_count()))
    return torch.device(kinds[0], accelerator.current_device())
