"""The expert bias (moe_router_enable_expert_bias) of routers that are not trained.

What is wrong (0.12 to 0.19): at the end of a step, finalize_model_grads moves the buffer `expert_bias` of every router
by the tokens of its experts, whether the router is trained or not. With LoRA, or with a frozen router, tokens go to
other experts in each step. Adapters do not hold the buffer: the adapters that were trained fit a model that is saved
nowhere.

The patch gives routers back the bias that they had before, if none of their weights requires a gradient. Upstream's
function runs as it is, so every rank takes part in its collective, and the counts of tokens begin anew. The bias of a
router with a weight that is trained still moves.

Upstream: open. 0.19 has a flag `frozen_expert_bias` of the router, off by default (Megatron-LM pull request 5019).

Delete when: no supported release moves the bias of a frozen router by default.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function, argument

UPDATE_ROUTER_EXPERT_BIAS = "megatron.core.distributed.finalize_model_grads:_update_router_expert_bias"


def _update_router_expert_bias(original: Function) -> Function:
    chunks_of = argument(original, "model")

    @functools.wraps(original)
    def _update_router_expert_bias(*args: Any, **kwargs: Any) -> Any:
        held = [(router, router.expert_bias.clone()) for router in _frozen_routers(chunks_of(args, kwargs))]
        result = original(*args, **kwargs)
        with torch.no_grad():
            for router, bias in held:
                router.expert_bias.copy_(bias)
        return result

    return _update_router_expert_bias


def _frozen_routers(chunks: Iterable[Any]) -> Iterator[Any]:
    """The routers with a bias whose weights require no gradient."""
    for chunk in chunks:
        for module in chunk.modules():
            has_bias = getattr(module, "expert_bias", None) is not None
            if has_bias and not any(weight.requires_grad for weight in module.parameters()):
                yield module


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {UPDATE_ROUTER_EXPERT_BIAS: _update_router_expert_bias}
