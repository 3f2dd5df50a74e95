"""Defect 2: the routers of a model that is gone stay in RouterReplay.global_router_replay_instances.

The `Watch` of an apply() takes the replay of a router out of that list when the router goes. It also tells the
checkpoints (`recompute`) whether the process has a router with a replay at all.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from typing import Any

from shim.patches._arguments import Function, argument

REPLAY = "megatron.core.transformer.moe.router_replay"


class Watch:
    """The routers that were built since apply(), each with what happens when it goes."""

    def __init__(self) -> None:
        self.watched: list[weakref.finalize[Any, Any]] = []

    def replays(self) -> bool:
        """Whether the process has a router with a replay."""
        module = sys.modules.get(REPLAY)
        return module is not None and bool(module.RouterReplay.global_router_replay_instances or self.alive())

    def alive(self) -> int:
        if not all(each.alive for each in self.watched):
            self.watched = [each for each in self.watched if each.alive]
        return len(self.watched)

    def add(self, router: Any) -> None:
        found = weakref.finalize(router, _forget, router.router_replay)
        found.atexit = False
        self.alive()
        self.watched.append(found)

    def held(self) -> str:
        return f"{self.alive()} routers whose replay goes with them" if self.alive() else ""

    def release(self) -> None:
        for each in self.watched:
            each.detach()
        self.watched = []


def _forget(replay: Any) -> None:
    instances = getattr(type(replay), "global_router_replay_instances", [])
    instances[:] = [each for each in instances if each is not replay]  # in place: trainers keep the list


def patch_router_init(original: Function, watch: Watch) -> Function:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if getattr(self, "router_replay", None) is not None:
            watch.add(self)

    return __init__


def patch_set_replay_data(original: Function) -> Function:
    experts_of = argument(original, "all_layers_topk_indices")

    @functools.wraps(original)
    def set_replay_data(*args: Any, **kwargs: Any) -> Any:
        instances = sys.modules[REPLAY].RouterReplay.global_router_replay_instances
        if len(instances) > len(experts_of(args, kwargs)):
            gc.collect()  # stock would raise: a model that is gone may wait for the collector
        return original(*args, **kwargs)

    return set_replay_data
