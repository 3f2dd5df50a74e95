"""The bias of experts in routers that are not trained.

What is wrong (0.12 to 0.19): at the end of a step, finalize_model_grads moves the bias of every router by the tokens
of its experts, whether the router is trained or not. The bias is a buffer: `expert_bias` under
moe_router_enable_expert_bias, and in 0.19 `qb_beta` under quantile balancing. With LoRA, or with a frozen router,
tokens go to other experts in each step. Adapters do not hold the buffer: the trained adapters fit a model that is saved
nowhere.

The patch gives a router back the bias that it had before, if none of its weights requires a gradient, also if an
adapter is around the router. Upstream's function runs as it is, so every rank takes part in its collective, and counts
begin anew. The bias of a router that is trained still moves, such as that of a copy for modules_to_save, unless its
flag `frozen_expert_bias` is set. The patch reads this flag in all releases.

Upstream: open. 0.19 has a flag `frozen_expert_bias` of the router, off by default, which trainers must set
(Megatron-LM pull requests 4785 and 5019). It does not hold `qb_beta`.

Delete when: no supported release moves the bias of a router whose weights are frozen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function, argument

FINALIZE = "megatron.core.distributed.finalize_model_grads:"
BIAS_OF = {
    FINALIZE + "_update_router_expert_bias": "expert_bias",
    FINALIZE + "_update_router_qb_beta": "qb_beta",
}


def _update(original: Function, bias: str) -> Function:
    chunks_of = argument(original, "model")

    @functools.wraps(original)
    def update(*args: Any, **kwargs: Any) -> Any:
        held = [(router, getattr(router, bias).clone()) for router in _frozen(chunks_of(args, kwargs), bias)]
        result = original(*args, **kwargs)
        with torch.no_grad():
            for router, value in held:
                getattr(router, bias).copy_(value)
        return result

    return update


def _frozen(chunks: Iterable[Any], bias: str) -> Iterator[Any]:
    """The routers whose bias is to stay: their flag says so, or they have weights of which none requires a gradient."""
    for _, router in _with_bias(chunks, bias):
        if _has_flag(router) or {weight.requires_grad for weight in router.parameters()} == {False}:
            yield router


def _has_flag(router: Any) -> bool:
    return bool(getattr(router, "frozen_expert_bias", False))


def _with_bias(chunks: Iterable[Any], bias: str) -> Iterator[tuple[str, Any]]:
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if getattr(module, bias, None) is not None:
                yield name, module


def problems(models: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """What keeps the patch from its effect: a bias whose module has no weight that says whether it is frozen."""
    for model in models:
        if all(weight.requires_grad for weight in model.parameters()):
            continue
        for name, module in _with_bias([model], "expert_bias"):
            if not _has_flag(module) and next(module.parameters(), None) is None:
                yield (
                    f"expert_bias of {name} moves in every step, because {name} has no weight that says it is frozen",
                    "set frozen_expert_bias of this module to True if its router is frozen",
                )


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    bound = {target: functools.partial(_update, bias=bias) for target, bias in BIAS_OF.items()}
    if variant != "v0_19":
        del bound[FINALIZE + "_update_router_qb_beta"]
    return bound
