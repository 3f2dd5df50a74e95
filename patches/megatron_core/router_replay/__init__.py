"""Router replay (moe_enable_routing_replay) in recompute, after a rebuild, with a fused router, with repeated experts.

What is wrong (0.16 to 0.20):
- A recompute takes the experts that the trainer's list has next, or those of the microbatch that came last. After a
  forward pass without backward, such as one for log-probabilities, the list still has the experts of that pass: the
  recompute uses them, and the gradient is that of other experts. With REPLAY_FORWARD left on under a pipeline's
  schedule, the first microbatch is recomputed with the experts of a later one. Both in silence.
- A router of a model that is gone stays in RouterReplay.global_router_replay_instances. After a rebuild the list has
  twice the routers: set_replay_data raises, and who assigns by position gives the experts to the dead ones.
- With moe_router_fusion the router never looks at its replay, and chooses its own experts in silence.
- Experts for fewer tokens than there are, or for fewer than top-k, are taken: the other tokens get no experts.
- A row of padding names an expert several times. The routing map has the expert once, but the all-to-all dispatcher
  counts tokens x top-k, and raises (0.16 takes this number with moe_permute_fusion only). The probability is that of
  one of the names, while the gradient is that of all.

The patch: a checkpoint remembers what each router did in its forward pass, and its recompute does the same again: the
replayed experts, or the router's own choice. It does not matter what the trainer has set since. An entry of
replay_backward_list that belongs to such a recompute is taken out, as upstream takes one out. A router takes its
replay along when it goes. A router with an action is not fused. Experts of a wrong shape raise RouterReplayError.
A replayed map is counted, as the dispatcher counts the map of a capacity factor: the wait for the device that the pass
has comes before the permutation. An expert gets the sum of the probabilities of its names, as with dense_output, which
has a place for each name, and in an engine that runs the expert for each.

Models without replay, and passes in which no router replays, run as on stock. tensor_parallel.checkpoint and
te_checkpoint are covered. In torch.utils.checkpoint, which belongs to torch, REPLAY_BACKWARD takes from the list as on
stock. A router that was built before shim.apply() stays in the list. Nothing is counted where a CUDA graph holds the
preparation of the dispatcher, because a graph cannot wait.

Upstream: open; trainers work around it one by one (verl issues 7340 and 7805, NeMo-RL pull request 3903; verl pull
request 4986 and ms-swift for repeated experts).

Delete when a recompute has the experts of its forward pass upstream, and repeated experts are dispatched.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from shim._errors import ShimError
from shim._resources import Bindings, Resource
from shim.patches._arguments import Function, argument, replacing
from shim.patches._named import Named

REPLAY = "megatron.core.transformer.moe.router_replay"
GET_REPLAY_TOPK = f"{REPLAY}:RouterReplay.get_replay_topk"
SET_REPLAY_DATA = f"{REPLAY}:RouterReplay.set_replay_data"
ROUTER = "megatron.core.transformer.moe.router:TopKRouter.__init__"
ROUTING = "megatron.core.transformer.moe.moe_utils:topk_routing_with_score_function"
PREPROCESS = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.preprocess"
CHECKPOINT = "megatron.core.tensor_parallel.random:CheckpointFunction.forward"
TE_CHECKPOINT = "megatron.core.extensions.transformer_engine:te_checkpoint"

# Attributes: of a routing map that a replay has made, and of a dispatcher that waits earlier for its sake.
REPLAYED, SYNC_POINT = "_shim_replayed", "_shim_sync_point"


class RouterReplayError(ShimError, ValueError):
    """The experts that a router is to replay do not fit its tokens."""


class _Open(Named, threading.local):
    """What runs in this thread.

    chunks: the checkpoints whose function runs, from the outermost.
    replayed: the experts that the last router has replayed, [tokens, topk]; None where it chose its own.
    """

    def __init__(self) -> None:
        self.chunks: list[_Chunk] = []
        self.replayed: Any = None


_OPEN = _Open()


class _Chunk:
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
        _OPEN.chunks.append(self)
        try:
            return self.function(*args, **kwargs)
        finally:
            _OPEN.chunks.pop()
            self.recomputes = True

    def knows(self, replay: Any) -> bool:
        """Whether the router has another call in the forward pass than those that were made again."""
        return self.recomputes and self.seen.get(replay, 0) < len(self.calls.get(replay, ()))

    def next_call(self, replay: Any) -> Any:
        number = self.seen.get(replay, 0)
        self.seen[replay] = number + 1
        return self.calls[replay][number]


def _recomputed(replay: Any) -> _Chunk | None:
    """The checkpoint in whose recompute the router runs, if it ran in its forward pass."""
    return next((chunk for chunk in reversed(_OPEN.chunks) if chunk.knows(replay)), None)


def _get_replay_topk(original: Function) -> Function:
    scores_of, topk_of = argument(original, "scores"), argument(original, "topk")

    @functools.wraps(original)
    def get_replay_topk(self: Any, *args: Any, **kwargs: Any) -> Any:
        chunk = _recomputed(self) if _OPEN.chunks else None
        if chunk is None:
            experts = _given(self)
            if experts is not None:
                _check(experts, scores_of((self, *args), kwargs), topk_of((self, *args), kwargs))
            found = original(self, *args, **kwargs)
        else:
            experts = chunk.next_call(self)
            with _doing(self, experts):
                found = original(self, *args, **kwargs)
            _take_out(self, experts)
        _OPEN.replayed = None if experts is None else found[1]
        for open_chunk in _OPEN.chunks:
            if not open_chunk.recomputes:
                open_chunk.calls.setdefault(self, []).append(experts)
        return found

    return get_replay_topk


def _given(replay: Any) -> Any:
    """What the router is to replay now, [tokens, topk]; None where it chooses its own experts."""
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


@contextlib.contextmanager
def _doing(replay: Any, experts: Any) -> Iterator[None]:
    """Let the router do what it did in the forward pass."""
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


def _take_out(replay: Any, experts: Any) -> None:
    """Take what was replayed out of the trainer's list, as REPLAY_BACKWARD does."""
    entries = replay.replay_backward_list
    found = next((index for index, entry in enumerate(entries) if entry is experts), None)
    if found is not None:
        del entries[found]


def _routing(original: Function) -> Function:
    replay_of, fused_of = argument(original, "router_replay"), argument(original, "fused")
    with_fused = replacing(original, "fused")

    @functools.wraps(original)
    def topk_routing_with_score_function(*args: Any, **kwargs: Any) -> Any:
        replay = replay_of(args, kwargs)
        if replay is not None and fused_of(args, kwargs) and _looks_at(replay):
            args, kwargs = with_fused(args, kwargs, False)
        if replay is None:
            return original(*args, **kwargs)
        _OPEN.replayed = None
        found = original(*args, **kwargs)
        experts, _OPEN.replayed = _OPEN.replayed, None
        # A dense result, [tokens, topk], has a place for each name.
        if experts is not None and found[1].dtype == torch.bool:
            _add_up(found[0], experts)
            setattr(found[1], REPLAYED, True)
        return found

    return topk_routing_with_score_function


def _add_up(probs: Any, experts: Any) -> None:
    """Give each expert the sum of the probabilities of its names, where upstream has that of one.

    probs: [tokens, experts], overwritten. experts: [tokens, topk]. Upstream's gradient is that of the sum already.
    """
    with torch.no_grad():
        names = (experts.unsqueeze(2) == experts.unsqueeze(1)).sum(2)
        probs.scatter_(1, experts, probs.gather(1, experts) * names)


def _preprocess(original: Function) -> Function:
    map_of = argument(original, "routing_map")

    @functools.wraps(original)
    def preprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Upstream's point only ever comes earlier. That of a replay is for its own pass.
        self.cuda_sync_point = self.__dict__.pop(SYNC_POINT, self.cuda_sync_point)
        found = original(self, *args, **kwargs)
        routing_map = map_of((self, *args), kwargs)
        # With a capacity the number is that of the map or of the capacity already. A CUDA graph cannot wait.
        static = isinstance(self.num_out_tokens, int) and not self.drop_and_pad
        if static and getattr(routing_map, REPLAYED, False) and self.cuda_dtoh_point == "before_permutation_1":
            self.num_out_tokens = routing_map.sum()
            setattr(self, SYNC_POINT, self.cuda_sync_point)
            self._maybe_update_cuda_sync_point("before_permutation_1")
        return found

    return preprocess


def _looks_at(replay: Any) -> bool:
    """Whether the router records or replays. A recompute does as its forward pass did."""
    if any(chunk.recomputes for chunk in _OPEN.chunks):
        return _recomputed(replay) is not None
    return replay.router_replay_action is not None


def _checkpoint_forward(original: Function, watch: _Watch) -> Function:
    @functools.wraps(original)
    def forward(ctx: Any, run_function: Function, *args: Any, **kwargs: Any) -> Any:
        if watch.replays() and any(ctx.needs_input_grad):
            run_function = _Chunk(run_function)
        return original(ctx, run_function, *args, **kwargs)

    return forward


def _te_checkpoint(original: Function, watch: _Watch) -> Function:
    @functools.wraps(original)
    def te_checkpoint(forward_func: Function, *args: Any, **kwargs: Any) -> Any:
        # Transformer Engine looks into a module to choose its way. megatron-core gives it none that has a router.
        if watch.replays() and not isinstance(forward_func, torch.nn.Module):
            forward_func = _Chunk(forward_func)
        return original(forward_func, *args, **kwargs)

    return te_checkpoint


class _Watch:
    """Takes the replay of a router out of the global list when the router goes."""

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


def _router(original: Function, watch: _Watch) -> Function:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if getattr(self, "router_replay", None) is not None:
            watch.add(self)

    return __init__


def _set_replay_data(original: Function) -> Function:
    experts_of = argument(original, "all_layers_topk_indices")

    @functools.wraps(original)
    def set_replay_data(*args: Any, **kwargs: Any) -> Any:
        instances = sys.modules[REPLAY].RouterReplay.global_router_replay_instances
        if len(instances) > len(experts_of(args, kwargs)):
            gc.collect()  # stock would raise: a model that is gone may wait for the collector
        return original(*args, **kwargs)

    return set_replay_data


def problems(models: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """What keeps a router from its replay."""
    module = sys.modules.get(REPLAY)
    known = [] if module is None else module.RouterReplay.global_router_replay_instances
    routers = [part for model in models for part in model.modules() if getattr(part, "router_replay", None) is not None]
    if any(getattr(router, "routing_type", "") == "sinkhorn" for router in routers):
        yield (
            "a router that balances by sinkhorn never looks at its replay",
            "choose another moe_router_load_balancing_type",
        )
    if known and any(all(router.router_replay is not each for each in known) for router in routers):
        yield (
            "the replay of a router is not among RouterReplay.global_router_replay_instances, as in a copied model",
            "build the model instead of copying it, or put the replay of its routers into that list",
        )


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    watch = _Watch()
    factories: dict[str, Callable[[Function], Function]] = {
        GET_REPLAY_TOPK: _get_replay_topk,
        SET_REPLAY_DATA: _set_replay_data,
        ROUTER: functools.partial(_router, watch=watch),
        ROUTING: _routing,
        PREPROCESS: _preprocess,
        CHECKPOINT: functools.partial(_checkpoint_forward, watch=watch),
        TE_CHECKPOINT: functools.partial(_te_checkpoint, watch=watch),
    }
    return Bindings(factories, Resource(watch.held, watch.release))
