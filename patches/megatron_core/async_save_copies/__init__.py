"""The copies that an asynchronous save writes.

What is wrong (0.12 to 0.16): an asynchronous save without a persistent worker copies weights and states to pinned host
memory, and forks a process that writes them. TemporalAsyncCaller keeps nothing of the copies, so their memory goes back
to torch's cache of pinned memory while the process writes. The next tensor that is pinned, as a batch, may get it.

The patch lets the caller keep the copies until the process has ended, as 0.17 does. A request without copies, and the
persistent worker, stay as they are.

Upstream: right from 0.17 on (Megatron-LM pull request 2288).

Delete when: megatron-core 0.16 is not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing

CALLER = "megatron.core.dist_checkpointing.strategies.async_utils:TemporalAsyncCaller."
KEPT = "_shim_kept"  # of a caller: the copies that its process writes


def _schedule(original: Function) -> Function:
    request_of, with_request = argument(original, "async_req"), replacing(original, "async_req")

    @functools.wraps(original)
    def schedule_async_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = request_of((self, *args), kwargs)
        if not request.preload_fn:
            return original(self, *args, **kwargs)

        def preload() -> Any:
            copies = request.preload_fn()
            setattr(self, KEPT, copies)
            return copies

        given, kwargs = with_request((self, *args), kwargs, request._replace(preload_fn=preload))
        return original(*given, **kwargs)

    return schedule_async_call


def _close(original: Function) -> Function:
    @functools.wraps(original)
    def close(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        vars(self).pop(KEPT, None)
        return found

    return close


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {CALLER + "schedule_async_call": _schedule, CALLER + "close": _close}
