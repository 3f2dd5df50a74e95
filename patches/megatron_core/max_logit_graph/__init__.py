"""Autograd graphs that the logged maximum of attention logits keeps alive.

What is wrong (0.16 to 0.18, with `log_max_attention_logit` or `qk_clip`): TEDotProductAttention keeps the largest
logit of each head over the microbatches, as `current_max_attn_logits`. The tensor is an output of attention and has
its graph. The next maximum takes the one before as its input. So what the autograd functions of all microbatches keep
for themselves stays alive. With `qk_clip` it ends with the step. With `log_max_attention_logit` alone nothing ends
it: memory grows with each microbatch, and the logged number is the largest of the whole run.

The patch detaches the maximum as soon as it is there. Upstream uses it for the log and for the clip, without gradients.
From 0.17 it also begins anew behind a `clip_qk` that only logs, as 0.19 does. 0.16 cannot log without a maximum, and
keeps its running one.

Upstream: fixed in 0.19 by pull request 5067.

Delete when: megatron-core 0.18 is not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument

FORWARD = "megatron.core.extensions.transformer_engine:TEDotProductAttention.forward"
CLIP = "megatron.core.optimizer.qk_clip:clip_qk"
MAXIMUM = "current_max_attn_logits"


def _forward(original: Function) -> Function:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        largest = getattr(self, MAXIMUM, None)
        if largest is not None and largest.requires_grad:
            setattr(self, MAXIMUM, largest.detach())
        return output

    return forward


def _clip_qk(original: Function) -> Function:
    model_of, only_logs = argument(original, "model"), argument(original, "log_max_only")

    @functools.wraps(original)
    def clip_qk(*args: Any, **kwargs: Any) -> Any:
        largest = original(*args, **kwargs)
        if only_logs(args, kwargs):
            for chunk in model_of(args, kwargs):
                for layer in chunk.module.module.decoder.layers:
                    if hasattr(layer.self_attention, "clip_qk"):
                        setattr(layer.self_attention.core_attention, MAXIMUM, None)
        return largest

    return clip_qk


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    found: dict[str, Callable[[Function], Function]] = {FORWARD: _forward}
    return found if variant == "v0_16" else {**found, CLIP: _clip_qk}
