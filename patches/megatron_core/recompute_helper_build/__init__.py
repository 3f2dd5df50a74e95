"""The C++ helper that recompute of outputs compiles on its first use.

What is wrong (0.17 to 0.19): CheckpointWithoutOutput refills its outputs by a helper that `load_inline` compiles in the
first backward that needs it: for half a minute, and without a word. torch locks the directory in which it compiles. Up
to torch 2.13 a process that is killed meanwhile leaves the lock, and every later run on this machine waits for it
without an end, in backward. On a machine without a compiler or without ninja, backward raises.

The patch looks for the lock first. If nothing in the directory has changed for two minutes, nobody compiles there: a
warning names the lock, and outputs are refilled by a copy, which gives the same bits and needs their memory once more.
The same if the compiler fails. If somebody compiles, the patch waits for that, and says so. The helper itself is
upstream's.

Upstream: open. No report was found.

Delete when: no supported release compiles a helper in backward.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shim._torch_names import find
from shim.ops._storage import copy_storage
from shim.patches._arguments import Function

log = logging.getLogger("shim")

RANDOM = "megatron.core.tensor_parallel.random"
HELPER = "share_storage_ext"
SETTLED = 120.0  # seconds without a change, behind which nobody compiles any more
SAID_AFTER, ASKED_EACH = 5.0, 0.5


def lock_of_helper() -> Path | None:
    """The lock that torch takes to compile the helper. None if this torch does not say where, or leaves none behind.

    From torch 2.14 on the lock is one of the system, which ends it with the process, and its file stays for ever.
    """
    if find("torch.utils.cpp_extension:FileBaton") is None:
        return None
    directory_of = find("torch.utils.cpp_extension:_get_build_directory")
    return None if directory_of is None else Path(directory_of(HELPER, False)) / "lock"


def _last_change(directory: Path) -> float:
    """When a file of the directory has changed last, in seconds since the epoch; 0.0 if it has none any more."""
    changes = []
    for file in directory.glob("*"):
        try:
            changes.append(file.stat().st_mtime)
        except FileNotFoundError:  # the compiler removes files
            continue
    return max(changes, default=0.0)


def is_stale(lock: Path, now: Callable[[], float] = time.time, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Wait until a lock is released: False. True once nothing beside it has changed for `SETTLED` seconds.

    The clock of another machine may be ahead, if the directory is shared. So what counts is also how long this process
    has seen no change.
    """
    started = since = now()
    changed, said = _last_change(lock.parent), False
    while lock.exists():
        latest = _last_change(lock.parent)
        if latest != changed:
            changed, since = latest, now()
        if now() - changed >= SETTLED or now() - since >= SETTLED:
            return True
        if not said and now() - started >= SAID_AFTER:
            said = True
            log.warning(
                f"recompute-helper-build: waiting for another process that compiles a helper of recompute: {lock}"
            )
        sleep(ASKED_EACH)
    return False


def _get_share_storage(original: Function) -> Function:
    """Once chosen, the copy stays: all outputs of a process are refilled in one way."""
    module = vars(sys.modules[RANDOM])
    chosen: list[Function] = []

    def copy_instead(why: str) -> Function:
        log.warning(
            f"recompute-helper-build: {why}. Recomputed outputs are copied instead, with their memory once more"
        )
        chosen.append(copy_storage)
        return copy_storage

    @functools.wraps(original)
    def get() -> Function:
        if chosen:
            return chosen[0]
        if module["_share_storage_ext"] is not None:
            helper: Function = original()
            return helper
        lock = lock_of_helper()
        if lock is not None and lock.exists() and is_stale(lock):
            return copy_instead(
                f"{lock} is left from a process that has ended, and torch would wait for it for ever. Remedy: remove "
                "this file"
            )
        log.info("recompute-helper-build: compiling a helper of recompute, once on this machine: about half a minute")
        try:
            helper = original()
        except (OSError, RuntimeError, ImportError) as error:
            first = str(error).strip().partition("\n")[0] or type(error).__name__
            return copy_instead(f"the helper of recompute cannot be compiled here ({first})")
        return helper

    return get


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {f"{RANDOM}:_get_share_storage": _get_share_storage}
