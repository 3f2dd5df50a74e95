"""Backward in a thread of the device, as autograd runs that of a GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import torch

from shim._torch_names import required

__all__ = ["THREAD", "backward_in_a_thread"]

THREAD = "pretended cuda:0"
_ENGINE = "_engine_run_backward"


@contextlib.contextmanager
def backward_in_a_thread(modes: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Let torch.autograd run backward in one thread, inside `modes()`, and wait for it.

    Thread-local state of the caller is not there, which on a GPU it is not either. What backward starts itself, such as
    a recomputation, stays in the thread.
    """
    original = getattr(torch.autograd.graph, _ENGINE)
    threaded = required("torch:_C._is_multithreading_enabled")
    device = ThreadPoolExecutor(1, thread_name_prefix=THREAD)

    def run(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name.startswith(THREAD) or not threaded():
            return original(*args, **kwargs)
        return device.submit(inside, args, kwargs).result()

    def inside(args: Any, kwargs: Any) -> Any:
        with modes():
            return original(*args, **kwargs)

    owners: tuple[ModuleType, ...] = (torch.autograd, torch.autograd.graph)
    for owner in owners:
        setattr(owner, _ENGINE, run)
    try:
        yield
    finally:
        for owner in owners:
            setattr(owner, _ENGINE, original)
        device.shutdown()
