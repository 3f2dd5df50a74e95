"""The counts of a router in a model of 16 bits.

What is wrong (0.12 to 0.20): a router counts the tokens of each expert in buffers of fp32, and Float16Module makes them
bf16 or fp16 with the rest of the model. A router brings its expert bias back to fp32, but not its counts. bf16 counts
to 256 without a gap, and in the thousands in steps of 16 and more, at each of the microbatches that are added up. fp16
ends at 65504.
- `local_tokens_per_expert` moves the expert bias (moe_router_enable_expert_bias): that of an expert near the mean moves
  the wrong way.
- `global_tokens_per_expert` and `ga_steps` are the shares of the experts in the global auxiliary loss (0.15 to 0.20).
  From 256 microbatches on ga_steps stands still, and the loss forgets how many there were.

The patch brings these buffers back to fp32 where the router brings back its bias: before each forward, load and save.
They are as large as in a model of fp32, which is 2 bytes more for each expert of a layer, also in the message that adds
up the counts of a step. They are in no checkpoint. A model of fp32 does not change.

Upstream: Megatron-LM pull request 7081, merged in September 2026 and in no release yet, counts tokens for the bias in
integers, which the patch leaves as they are.

Delete when: the counts of a router stay in fp32 under Float16Module in every supported release.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function

MAINTAIN = "megatron.core.transformer.moe.router:TopKRouter._maintain_float32_expert_bias"
COUNTS = ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")


def _maintain(original: Function) -> Function:
    @functools.wraps(original)
    def _maintain_float32_expert_bias(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name in COUNTS:
            counts = getattr(self, name, None)
            if counts is not None and counts.is_floating_point() and counts.dtype != torch.float32:
                counts.data = counts.data.float()
        return original(self, *args, **kwargs)

    return _maintain_float32_expert_bias


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {MAINTAIN: _maintain}
