"""The two functions that a router calls. Defects 3 and 4 are here; 1 and 5 need these functions too.

topk_routing_with_score_function: a router that replays is not fused (3), and an expert with several names gets the sum
of their probabilities (5). It calls RouterReplay.get_replay_topk, which refuses experts of a wrong shape (4), and in a
recompute replays what the forward pass had (1).
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

import torch

from shim._errors import ShimError
from shim.patches._arguments import Function, argument, replacing
from shim.patches._named import Named
from shim.patches.megatron_core.router_replay.gone_routers import REPLAY
from shim.patches.megatron_core.router_replay.recompute import THREAD, doing, looks_at, recomputed, take_out
from shim.patches.megatron_core.router_replay.repeated_experts import REPLAYED, add_up


class RouterReplayError(ShimError, ValueError):
    """The experts that a router is to replay do not fit its tokens."""


class _Last(Named, threading.local):
    """experts: those that the last router of this thread has replayed, [tokens, topk]; None if it chose its own."""

    experts: Any = None


_LAST = _Last()


def patch_get_replay_topk(original: Function) -> Function:
    scores_of, topk_of = argument(original, "scores"), argument(original, "topk")

    @functools.wraps(original)
    def get_replay_topk(self: Any, *args: Any, **kwargs: Any) -> Any:
        chunk = recomputed(self) if THREAD.chunks else None
        if chunk is None:
            experts = _given(self)
            if experts is not None:
                _check(experts, scores_of((self, *args), kwargs), topk_of((self, *args), kwargs))
            found = original(self, *args, **kwargs)
        else:
            experts = chunk.next_call(self)
            with doing(self, experts):
                found = original(self, *args, **kwargs)
            take_out(self, experts)
        _LAST.experts = None if experts is None else found[1]
        for open_chunk in THREAD.chunks:
            if not open_chunk.recomputes:
                open_chunk.calls.setdefault(self, []).append(experts)
        return found

    return get_replay_topk


def _given(replay: Any) -> Any:
    """What the router is to replay now, [tokens, topk]; None if it chooses its own experts."""
    actions = sys.modules[REPLAY].RouterReplayAction
    if replay.router_replay_action == actions.REPLAY_FORWARD:
        return replay.target_topk_idx
    if replay.router_replay_action == actions.REPLAY_BACKWARD and replay.replay_backward_list:
        return replay.replay_backward_list[0]
    return None


def _check(experts: Any, scores: Any, topk: int) -> None:
    if tuple(experts.shape) != (scores.shape[0], topk):
        raise RouterReplayError(
            f"[router-replay] RouterReplay.get_replay_topk: experts of shape {tuple(experts.shape)} are to be replayed "
            f"for {scores.shape[0]} tokens with {topk} experts each. Give each router the experts of the tokens of its "
            "own rank: after packing, and after the cuts by context and sequence parallelism."
        )


def patch_topk_routing(original: Function) -> Function:
    replay_of, fused_of = argument(original, "router_replay"), argument(original, "fused")
    with_fused = replacing(original, "fused")

    @functools.wraps(original)
    def topk_routing_with_score_function(*args: Any, **kwargs: Any) -> Any:
        replay = replay_of(args, kwargs)
        if replay is not None and fused_of(args, kwargs) and looks_at(replay):
            args, kwargs = with_fused(args, kwargs, False)
        if replay is None:
            return original(*args, **kwargs)
        _LAST.experts = None
        found = original(*args, **kwargs)
        experts, _LAST.experts = _LAST.experts, None
        # A dense result, [tokens, topk], has a place for each name.
        if experts is not None and found[1].dtype == torch.bool:
            add_up(found[0], experts)
            setattr(found[1], REPLAYED, True)
        return found

    return topk_routing_with_score_function
