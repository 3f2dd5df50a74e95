"""Training after an evaluation under torch.inference_mode() in the same shape.

What is wrong (0.12 to 0.20): megatron-core keeps some tensors by the shape of a row alone. An evaluation under
torch.inference_mode() leaves inference tensors there, which autograd cannot save in the training that follows:
"Inference tensors cannot be saved for backward".

1. RotaryEmbedding.forward and YarnRotaryEmbedding.forward (lru_cache of 32 tables) by length. Full activation recompute
   saves the table, and so does Transformer Engine's fused rotary embedding.
2. get_default_causal_mask (up to 0.15) by length: unfused causal attention saves the mask.
3. YarnRotaryEmbedding._set_cos_sin_cache (from 0.13), and in 0.20 that of RotaryEmbedding: fused MLA saves both tables.
4. _build_head_perm_for_split_sections of gated delta net (from 0.19) by sections and ranks, under context parallelism.

PyTorch Lightning validates under torch.inference_mode() by default.

The patch: what is kept is made as outside of inference mode, without gradients, so that both modes can use it. The
caches are lru_cache objects of the same size and keys over upstream's functions, with cache_clear, cache_info and
cache_parameters. Upstream's are emptied, so that nothing from before is left. A call that finds a table costs what it
costs without the patch, and nothing is kept twice.

Upstream: open. 0.16 keeps no masks. megatron.rl clears the cache of the rotary embedding before and after it generates.

Delete when: no cache of megatron-core keeps a tensor of inference mode, and no supported release is older.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function

EMBEDDINGS = "megatron.core.models.common.embeddings."
ROPE = EMBEDDINGS + "rotary_pos_embedding:RotaryEmbedding."
YARN = EMBEDDINGS + "yarn_rotary_pos_embedding:YarnRotaryEmbedding."
MASK = "megatron.core.transformer.utils:get_default_causal_mask"
HEADS = "megatron.core.ssm.gated_delta_net.common:_build_head_perm_for_split_sections"

CACHE = type(functools.lru_cache(lambda: None))


def _made_outside(original: Function) -> Function:
    """The function, whose tensors are never those of inference mode."""

    @functools.wraps(original)
    def made_outside(*args: Any, **kwargs: Any) -> Any:
        # A compiled graph keeps nothing, and cannot ask for the mode.
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return original(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return original(*args, **kwargs)

    return made_outside


def _kept(original: Any) -> Function:
    """The cache over such a function. Somebody's function without a cache gets none."""
    if not isinstance(original, CACHE):
        return _made_outside(original)
    original.cache_clear()
    cache = functools.lru_cache(**original.cache_parameters())(_made_outside(original.__wrapped__))
    own = vars(cache)
    own.update({name: value for name, value in vars(original).items() if name not in own})
    return cache


V0_12: dict[str, Callable[[Function], Function]] = {ROPE + "forward": _kept, YARN + "forward": _kept}
V0_16 = {**V0_12, YARN + "_set_cos_sin_cache": _made_outside}
BINDINGS = {
    "v0_12": {**V0_12, MASK: _kept},
    "v0_13": {**V0_16, MASK: _kept},
    "v0_16": V0_16,
    "v0_19": {**V0_16, HEADS: _kept},
    "v0_20": {**V0_16, HEADS: _kept, ROPE + "_set_cos_sin_cache": _made_outside},
}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return BINDINGS[variant]
