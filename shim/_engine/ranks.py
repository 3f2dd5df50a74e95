"""Compares what ranks have applied: one digest of each, and all of it if the digests differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from shim._engine.log import distributed_if_ready

__all__ = ["NOTHING", "OWN_CODE", "PACKAGES", "PARTS", "ranks_that_differ"]

# The parts of a patch that are compared, with the words for each in messages.
PARTS = {"variant": "variant", "fingerprints": "upstream's bodies", "options": "options", "code": "its code"}
OWN_CODE, PACKAGES = "shim's own code", "files of packages"
# What foreign objects leave of a patch on a rank, with the words for each.
_EFFECTS = {"": "in force", "conflict": "in conflict", "failed": "failed", "in part": "in force in part"}
NOTHING = "nothing applied"  # instead of a digest


def ranks_that_differ(
    digest: str,
    patches: Mapping[str, Sequence[str]],
    releases: Mapping[str, str | None],
    group: Any = None,
    effects: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The ranks of `group` that differ from its first rank, and in which parts, in words; "" if all agree.

    digest: that of the plan.    releases: name -> release, for what is installed.
    patches: id -> the parts of the patch as applied here, in the order of PARTS; empty if it is not applied.
    effects: id -> one of _EFFECTS; "" for a patch that is not named.
    group: a process group of any backend. None is the default group; without one there are no ranks.

    Costs two small messages per rank, on the device of the group's backend (of NCCL the current one).
    """
    distributed = distributed_if_ready()
    if distributed is None:
        return ""
    size = distributed.get_world_size(group)
    if size < 2:  # alone, or not a member of the group (-1)
        return ""
    mine = {
        "digest": digest,
        "releases": {name: release for name, release in releases.items() if release is not None},
        "patches": {id: [_short(part) for part in parts] for id, parts in patches.items()},
        "effects": {id: effect for id, effect in effects.items() if effect and id in patches},
    }
    if len(set(_gathered(distributed, _short(json.dumps(mine, sort_keys=True)), size, group))) == 1:
        return ""
    all_of_them = _gathered(distributed, mine, size, group)
    # Ranks are numbered as in the world, not as in the group.
    ranks = range(size) if group is None else distributed.get_process_group_ranks(group)
    said = [
        f"rank {rank} differs in {_what(all_of_them[0], other)}"
        for rank, other in zip(ranks, all_of_them)
        if other != all_of_them[0]
    ]
    return f"{'; '.join(said)} (against rank {ranks[0]})"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _gathered(distributed: Any, mine: Any, size: int, group: Any) -> list[Any]:
    found: list[Any] = [None] * size
    distributed.all_gather_object(found, mine, group=group)
    return found


def _what(first: dict[str, Any], other: dict[str, Any]) -> str:
    if NOTHING in (first["digest"], other["digest"]):
        return "whether anything was applied at all"
    here, there = first["releases"], other["releases"]
    found = [
        f"{name} ({there.get(name, 'none')}, not {here.get(name, 'none')})"
        for name in {**here, **there}
        if here.get(name) != there.get(name)
    ]
    here, there = first["patches"], other["patches"]
    if here.keys() != there.keys():
        return ", ".join([*found, "the patches it knows of (another release of shim, or another matrix)"])
    found += [f"{id} ({_parts(here[id], there[id])})" for id in sorted(here) if here[id] != there[id]]
    for id in sorted(here):
        one, another = (_EFFECTS[side["effects"].get(id, "")] for side in (first, other))
        if one != another:
            found.append(f"{id} ({another}, not {one})")
    return ", ".join(found) or "its digest"


def _parts(one: list[str], other: list[str]) -> str:
    if not one or not other:
        return "applied" if other else "not applied"
    return ", ".join(words for words, a, b in zip(PARTS.values(), one, other) if a != b)
