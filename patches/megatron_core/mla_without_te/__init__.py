"""Multi-latent attention without Transformer Engine.

What is wrong (0.16): multi_latent_attention takes Transformer Engine for installed if
megatron.core.extensions.transformer_engine can be imported. But that can be imported without it, and then has mocks in
the place of layers. MultiLatentAttention asks whether its output projection is a TELinear. That is a mock and no class,
so isinstance() raises a TypeError. No model with multi-latent attention can be built, not even with local layers.

The patch makes the flag of that module False if TELinear is no class. With Transformer Engine the flag stays True.

Upstream: fixed in 0.17 by pull request 3763, which takes the flag of megatron.core.extensions.transformer_engine. Up to
0.15 the module asks only for FP8, which needs Transformer Engine anyway.

Delete when: 0.16 is not supported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

MODULE = "megatron.core.transformer.multi_latent_attention"


def _have_te(original: Any) -> bool:
    return bool(original) and isinstance(vars(sys.modules[MODULE])["TELinear"], type)


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Any], Any]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {f"{MODULE}:HAVE_TE": _have_te}
