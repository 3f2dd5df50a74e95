"""Proof of async-save-copies."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from shim.testing.proof import Here, proof


def nothing(*args: Any) -> None:
    """Stands for the function that writes."""


def request(copies: list[Any], write: Any = nothing) -> Any:
    """A request whose copy is made when it is scheduled; `copies` gets a weak reference to it."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

    def preload() -> list[torch.Tensor]:
        copy = torch.zeros(8)
        copies.append(weakref.ref(copy))
        return [copy]

    return AsyncRequest(async_fn=write, async_fn_args=(None, None), finalize_fns=[], preload_fn=preload)


def dropped() -> int:
    """Copies that are gone before their process has ended."""
    from megatron.core.dist_checkpointing.strategies.async_utils import TemporalAsyncCaller

    caller, copies = TemporalAsyncCaller(), []  # type: ignore[var-annotated]
    caller.schedule_async_call(request(copies))
    gone = sum(copy() is None for copy in copies)
    caller.close()
    return gone


@proof("{:.0f} of 1 copies dropped while it is written", right="kept until it is written")
def copies_live_until_they_are_written(here: Here) -> int:
    """An asynchronous save gives the memory of its copies back while they are written.

    To reproduce: call `TemporalAsyncCaller().schedule_async_call` with an AsyncRequest whose `preload_fn` returns a
    list with a tensor, and look at a weak reference to that tensor before `close()`. On a GPU it is pinned memory,
    which torch hands out again.

    The list is an argument of the process alone, which drops its arguments when it has started. Right is that the
    tensor lives until the process has ended. From 0.12 to 0.16; fixed in 0.17 by Megatron-LM pull request 2288.
    """
    found: int = here.run(dropped)[0]
    return found
