"""The auxiliary loss of a router with moe_router_score_function="sigmoid", in half precision.

What is wrong (0.12 to 0.16): the scores of the auxiliary loss are sigmoid(logits), divided by their sum over experts. A
softmax is computed in fp32 there, and these are computed in the dtype of the logits: bf16 has three digits, the sum of
many experts loses the small scores, and a sigmoid near one has hardly a gradient left. The gradient of the loss is off
by more than a percent.

The patch has the scores computed in fp32, as 0.17 has them. The experts that the loss counts stay those that stock
counts: tokens are dispatched by scores in half precision, and other experts in the loss than get the tokens would be
farther from the truth than stock is. So the function is called once for each if it returns both, from 0.13 on.
Nothing happens with softmax, with the fused function, and if moe_router_dtype makes the logits fp32.

Upstream: commit 5f668c10ec, in 0.17.

Delete when: megatron-core 0.16 is not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function, argument, replacing

METHOD = "megatron.core.transformer.moe.router:TopKRouter.compute_routing_scores_for_aux_loss"
FUNCTION = "megatron.core.transformer.moe.moe_utils:compute_routing_scores_for_aux_loss"
HALF = (torch.float16, torch.bfloat16)


def _of_dispatch(original: Function) -> Function:
    """For 0.12: the scores. The loss counts the experts that get the tokens."""

    @functools.wraps(original)
    def compute_routing_scores_for_aux_loss(self: Any, logits: torch.Tensor) -> Any:
        rounded = self.score_function == "sigmoid" and logits.dtype in HALF
        return original(self, logits.float() if rounded else logits)

    return compute_routing_scores_for_aux_loss


def _of_router(original: Function) -> Function:
    """For 0.13: the scores, and the experts that the loss counts."""

    @functools.wraps(original)
    def compute_routing_scores_for_aux_loss(self: Any, logits: torch.Tensor) -> Any:
        if self.score_function != "sigmoid" or logits.dtype not in HALF:
            return original(self, logits)
        with torch.no_grad():
            _, routing_map = original(self, logits)
        scores, _ = original(self, logits.float())
        return scores, routing_map

    return compute_routing_scores_for_aux_loss


def _of_logits(original: Function) -> Function:
    """For 0.14 to 0.16: the experts, and the scores."""
    logits_of, with_logits = argument(original, "logits"), replacing(original, "logits")
    kind_of, fused_of = argument(original, "score_function"), argument(original, "fused")

    @functools.wraps(original)
    def compute_routing_scores_for_aux_loss(*args: Any, **kwargs: Any) -> Any:
        logits = logits_of(args, kwargs)
        if kind_of(args, kwargs) != "sigmoid" or logits.dtype not in HALF or fused_of(args, kwargs):
            return original(*args, **kwargs)
        with torch.no_grad():
            routing_map, _ = original(*args, **kwargs)
        args, kwargs = with_logits(args, kwargs, logits.float())
        _, scores = original(*args, **kwargs)
        return routing_map, scores

    return compute_routing_scores_for_aux_loss


BINDINGS = {
    "v0_12": {METHOD: _of_dispatch},
    "v0_13": {METHOD: _of_router},
    "v0_14": {FUNCTION: _of_logits},
}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return BINDINGS[variant]
