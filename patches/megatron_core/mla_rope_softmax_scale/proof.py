"""Proof of mla-rope-softmax-scale."""

from __future__ import annotations

import math
from typing import Any

from shim.patches.megatron_core import _proof_mla
from shim.testing.proof import Here, proof


def times_too_large(**options: Any) -> float:
    with _proof_mla.without_te() as module:
        layer: Any = _proof_mla.build(module, **options)
    found: float = layer.softmax_scale * math.sqrt(layer.q_head_dim)
    return found


@proof("scores {:.2f} times too large", bound=1 + 1e-9)
def plain_rotary_embeddings_have_no_factor_of_yarn(here: Here) -> float:
    """Multi-latent attention with `rope_type="rope"` scales its scores by YaRN's factor.

    To reproduce: build an MLASelfAttention with `MLATransformerConfig(rope_type="rope", ...)` and the defaults
    `rotary_scaling_factor=40` and `mscale=0.707`, and look at `softmax_scale * sqrt(q_head_dim)`. It is 1.59, and right
    is 1, as from 0.14 on. Models without YaRN have no such factor. In 0.12 and 0.13.
    """
    found: float = here.run(times_too_large)[0]
    return found
