"""Padding and the bias of experts (moe_router_enable_expert_bias).

What is wrong (0.16 to 0.19): the router counts the tokens of each expert and moves the bias by the counts. To leave out
padding, it combines a mask with one value per token, [T], with a map of tokens and experts, [T, E]. Every step with a
padding mask raises. If a rank has as many tokens as experts, the shapes fit: the mask then leaves out experts instead
of tokens, and the bias silently moves the wrong way.

The patch passes the mask as a column [T, 1]. A step without a mask does not change.

Upstream: Megatron-LM pull request 6114, on the main branch since 2026-08-20 and in no release yet. The dev branch has
fixed it in a similar way.

Delete when: the releases before the one that brings pull request 6114 are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function, argument, replacing
from shim.patches._stubs import device_of, view_of

APPLY_EXPERT_BIAS = "megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias"


def _apply_expert_bias(original: Function) -> Function:
    mask_of, with_mask = argument(original, "padding_mask"), replacing(original, "padding_mask")

    @functools.wraps(original)
    def _apply_expert_bias(*args: Any, **kwargs: Any) -> Any:
        mask = mask_of(args, kwargs)
        if mask is not None:
            args, kwargs = with_mask(args, kwargs, mask.reshape(-1, 1))
        return original(*args, **kwargs)

    return _apply_expert_bias


def probe(module: Any, method: str, models: list[Any]) -> bool | str:
    """Routes three tokens to two experts; the last token is padding. See docs/patch-modules.md."""
    if not module.config.moe_router_enable_expert_bias:
        return True
    counts = torch.zeros(2, device=device_of(module))
    view = view_of(module, module.config, local_tokens_per_expert=counts, enable_expert_bias=True)
    routed = torch.tensor([[True, False], [True, False], [False, True]], device=counts.device)
    view._apply_expert_bias(routed, padding_mask=torch.tensor([False, False, True], device=counts.device))
    found = view.local_tokens_per_expert.tolist()
    return "it counts no tokens" if found == [0, 0] else found == [2, 0]


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {APPLY_EXPERT_BIAS: _apply_expert_bias}
