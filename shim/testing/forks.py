"""Forks that leave alone what they inherit, and the end of process groups, whose threads belong to one process."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version

__all__ = ["forking", "free_groups"]

# Before torch 2.8 (pull request 154976) the destructor of a gloo group keeps Python's lock while it waits for the
# group's thread. The thread may want the same lock, to free the tensor of the last collective. Both wait forever.
_MAY_HANG = Version(torch.__version__) < Version("2.8")
# process id -> groups whose destructors have not run yet; a forked process must not run those of its parent
_ENDED: dict[int, list[Any]] = {}


@contextlib.contextmanager
def forking() -> Iterator[Callable[[], None]]:
    """Fork inside: no process that is forked here collects garbage of the process that forks it.

    The destructors of some garbage belong to one process. That of a process group of gloo waits for threads that a fork
    does not have: it hangs or crashes. So the garbage collector is off inside, in both processes. A forked process may
    call what this yields: it turns the collector on again, if it was on, for objects that come later.
    """
    enabled = gc.isenabled()

    def collect_what_comes() -> None:
        gc.freeze()
        if enabled:
            gc.enable()

    gc.disable()
    try:
        yield collect_what_comes
    finally:
        if enabled:
            gc.enable()


def free_groups(groups: Sequence[Any]) -> None:
    """Destroy these process groups. Where torch may hang in that, their destructors run at the next call.

    By then their threads have freed what they had. Those of the last call run at the end of the process, if at all.
    """
    for group in groups:
        dist.destroy_process_group(group)
    if _MAY_HANG:
        _ENDED[os.getpid()] = list(groups)
