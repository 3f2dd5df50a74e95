"""A mixture of experts without Transformer Engine.

What is wrong (0.13 to 0.16): moe_utils imports te_general_gemm from megatron's extensions. If Transformer Engine is
not installed, the import fails in silence and the name is missing. The router's product asks whether the name is None,
so every model with experts raises a NameError in its first forward pass.

The patch: a missing name is None, which later releases set themselves. The router then computes its product by torch. A
name that is there stays.

Upstream: fixed in 0.17.0.

Delete when: releases before 0.17 are not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

TARGET = "megatron.core.transformer.moe.moe_utils:te_general_gemm"


def _te_general_gemm(original: Any) -> Any:
    return original if callable(original) else None


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Any], Any]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {TARGET: _te_general_gemm}
