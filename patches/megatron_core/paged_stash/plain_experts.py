"""Experts without the fused operations: their whole forward is stashed, if their buffers have spare rows."""

from __future__ import annotations

import functools
from typing import Any

from shim.patches._arguments import Function, argument
from shim.patches.megatron_core.paged_stash.experts import ExpertStash
from shim.patches.megatron_core.paged_stash.settings import FLAG

FUSED_ASK_THE_CONFIG = "the fused operations of upstream ask the config for moe_paged_stash, and no option"


def patch_grouped(original: Function, stash: ExpertStash) -> Function:
    hidden = argument(original, "permuted_local_hidden_states")
    probs = argument(original, "permuted_probs")

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = (self, *args)
        if not stash.wanted(self.config):
            return original(*call, **kwargs)
        if is_fused(self):
            if not getattr(self.config, FLAG, False):
                stash.skip(self, FUSED_ASK_THE_CONFIG)
            return original(*call, **kwargs)
        run = functools.partial(original, *call, **kwargs)
        return stash.run(run, self, hidden(call, kwargs), probs(call, kwargs))

    return forward


def patch_mlp(original: Function, stash: ExpertStash) -> Function:
    """An MLP gets the probabilities of its tokens only from SequentialMLP."""
    hidden, scale = argument(original, "hidden_states"), argument(original, "per_token_scale")

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = (self, *args)
        probs = scale(call, kwargs)
        if probs is None or not stash.wanted(self.config):
            return original(*call, **kwargs)
        return stash.run(functools.partial(original, *call, **kwargs), self, hidden(call, kwargs), probs)

    return forward


def is_fused(module: Any) -> bool:
    return bool(getattr(module, "_with_fused_impl", False))
