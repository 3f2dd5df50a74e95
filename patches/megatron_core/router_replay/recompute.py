"""Defect 1: a recompute takes the experts of another forward pass.

A checkpoint gets a `Chunk` in the place of its function. In the forward pass the Chunk notes what each router was given
to replay. In the recompute `patch_get_replay_topk` (`router`) asks it, and each router does the same again.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch

from shim.patches._arguments import Function
from shim.patches._named import Named
from shim.patches.megatron_core.router_replay.gone_routers import REPLAY, Watch


class _Thread(Named, threading.local):
    """chunks: the checkpoints whose function runs in this thread, from the outermost."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []


THREAD = _Thread()


class Chunk:
    """What a checkpoint keeps in the place of its function, with what each router did in the forward pass.

    It shows the cells of the function, because trainers look for a layer among them.
    """

    def __init__(self, function: Function) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.recomputes = False
        # For each call of a router: the experts that it was given to replay [tokens, topk], or None.
        self.calls: dict[Any, list[Any]] = {}
        self.seen: dict[Any, int] = {}

    @property
    def __closure__(self) -> tuple[types.CellType, ...]:
        return getattr(self.function, "__closure__", None) or ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = {}
        THREAD.chunks.append(self)
        try:
            return self.function(*args, **kwargs)
        finally:
            THREAD.chunks.pop()
            self.recomputes = True

    def knows(self, replay: Any) -> bool:
        """Whether the router was called more often in the forward pass than in this recompute until now."""
        return self.recomputes and self.seen.get(replay, 0) < len(self.calls.get(replay, ()))

    def next_call(self, replay: Any) -> Any:
        number = self.seen.get(replay, 0)
        self.seen[replay] = number + 1
        return self.calls[replay][number]


def recomputed(replay: Any) -> Chunk | None:
    """The checkpoint whose recompute the router runs in, if the router ran in its forward pass."""
    return next((chunk for chunk in reversed(THREAD.chunks) if chunk.knows(replay)), None)


def looks_at(replay: Any) -> bool:
    """Whether the router records or replays. A recompute does as its forward pass did."""
    if any(chunk.recomputes for chunk in THREAD.chunks):
        return recomputed(replay) is not None
    return replay.router_replay_action is not None


@contextlib.contextmanager
def doing(replay: Any, experts: Any) -> Iterator[None]:
    """Inside, the router replays `experts` [tokens, topk], or chooses its own experts if they are None."""
    before = replay.router_replay_action, replay.target_topk_idx
    if experts is None:
        replay.router_replay_action = None
    else:
        replay.router_replay_action = sys.modules[REPLAY].RouterReplayAction.REPLAY_FORWARD
        replay.target_topk_idx = experts
    try:
        yield
    finally:
        replay.router_replay_action, replay.target_topk_idx = before


def take_out(replay: Any, experts: Any) -> None:
    """Take what was replayed out of the trainer's list, as REPLAY_BACKWARD does."""
    entries = replay.replay_backward_list
    found = next((index for index, entry in enumerate(entries) if entry is experts), None)
    if found is not None:
        del entries[found]


def patch_checkpoint_forward(original: Function, watch: Watch) -> Function:
    @functools.wraps(original)
    def forward(ctx: Any, run_function: Function, *args: Any, **kwargs: Any) -> Any:
        if watch.replays() and any(ctx.needs_input_grad):
            run_function = Chunk(run_function)
        return original(ctx, run_function, *args, **kwargs)

    return forward


def patch_te_checkpoint(original: Function, watch: Watch) -> Function:
    @functools.wraps(original)
    def te_checkpoint(forward_func: Function, *args: Any, **kwargs: Any) -> Any:
        # Transformer Engine looks into a module to choose its way. megatron-core gives it none that has a router.
        if watch.replays() and not isinstance(forward_func, torch.nn.Module):
            forward_func = Chunk(forward_func)
        return original(forward_func, *args, **kwargs)

    return te_checkpoint
