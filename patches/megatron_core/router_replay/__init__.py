"""Router replay (moe_enable_routing_replay) in recompute, after a rebuild, with a fused router, with repeated experts.

What is wrong (0.16 to 0.20):
1. A recompute takes the experts that the trainer's list has next, or those of the microbatch that came last. After a
   forward pass without backward, such as one for log-probabilities, the list still has the experts of that pass: the
   recompute uses them, and the gradient is that of other experts. With REPLAY_FORWARD left on under a pipeline's
   schedule, the first microbatch is recomputed with the experts of a later one. Both are silent.
2. A router of a model that is gone stays in RouterReplay.global_router_replay_instances. After a rebuild the list has
   twice the routers: set_replay_data raises, and a trainer that assigns by position gives the experts to dead routers.
3. With moe_router_fusion the router never looks at its replay, and silently chooses its own experts.
4. Experts for fewer tokens than there are, or for fewer than top-k, are taken: the other tokens get no experts.
5. A row of padding names an expert several times. The routing map has the expert once, but the all-to-all dispatcher
   counts tokens x top-k, and raises (0.16 takes this number with moe_permute_fusion only). The probability is that of
   one of the names, and the gradient that of all.

The patch:
1. A checkpoint remembers the choice of each router in its forward pass, and its recompute repeats it: the replayed
   experts, or the router's own choice. It does not matter what the trainer has set since. An entry of
   replay_backward_list that belongs to such a recompute is taken out, as upstream takes one out.
2. A router takes its replay along when it goes. A router that was built before shim.apply() stays in the list.
3. A router with an action is not fused.
4. Experts of a wrong shape raise RouterReplayError.
5. A replayed map is counted, as the dispatcher counts the map of a capacity factor: the wait for the device that the
   pass has comes before the permutation. Nothing is counted if a CUDA graph holds the preparation of the dispatcher,
   because a graph cannot wait. An expert gets the sum of the probabilities of its names, as with dense_output, which
   has a place for each name, and in an engine that runs the expert for each.

The calls, in the order of one step. On the right is the file that wraps the function, with the defect:

    a model is built   TopKRouter.__init__                         gone_routers: watches the router (2)
    the trainer        RouterReplay.set_replay_data                gone_routers: collects routers that are gone (2)
    a forward pass     CheckpointFunction.forward, te_checkpoint   recompute: a Chunk in the function's place (1)
                         topk_routing_with_score_function          router: not fused (3), adds up probabilities (5)
                           RouterReplay.get_replay_topk            router: checks shapes (4), tells the Chunk (1)
                         MoEAlltoAllTokenDispatcher.preprocess     repeated_experts: counts the map (5)
    backward             the same again, by the Chunk              router: get_replay_topk asks the Chunk (1)

Models without replay, and passes in which no router replays, run as on stock. tensor_parallel.checkpoint and
te_checkpoint are covered. In torch.utils.checkpoint, which belongs to torch, REPLAY_BACKWARD takes from the list as on
stock.

Upstream: open; trainers work around it one by one (verl issues 7340 and 7805, NeMo-RL pull request 3903; verl pull
request 4986 and ms-swift for repeated experts).

Delete when: a recompute has the experts of its forward pass upstream, and repeated experts are dispatched.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shim._resources import Bindings, Resource
from shim.patches._arguments import Function
from shim.patches.megatron_core.router_replay.gone_routers import (
    REPLAY,
    Watch,
    patch_router_init,
    patch_set_replay_data,
)
from shim.patches.megatron_core.router_replay.recompute import patch_checkpoint_forward, patch_te_checkpoint
from shim.patches.megatron_core.router_replay.repeated_experts import patch_preprocess
from shim.patches.megatron_core.router_replay.router import RouterReplayError as RouterReplayError
from shim.patches.megatron_core.router_replay.router import patch_get_replay_topk, patch_topk_routing

MOE = "megatron.core.transformer.moe."


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
    watch = Watch()
    factories: dict[str, Callable[[Function], Function]] = {
        f"{REPLAY}:RouterReplay.get_replay_topk": patch_get_replay_topk,
        f"{REPLAY}:RouterReplay.set_replay_data": patch_set_replay_data,
        MOE + "router:TopKRouter.__init__": functools.partial(patch_router_init, watch=watch),
        MOE + "moe_utils:topk_routing_with_score_function": patch_topk_routing,
        MOE + "token_dispatcher:MoEAlltoAllTokenDispatcher.preprocess": patch_preprocess,
        "megatron.core.tensor_parallel.random:CheckpointFunction.forward": functools.partial(
            patch_checkpoint_forward, watch=watch
        ),
        "megatron.core.extensions.transformer_engine:te_checkpoint": functools.partial(
            patch_te_checkpoint, watch=watch
        ),
    }
    return Bindings(factories, Resource(watch.held, watch.release))
