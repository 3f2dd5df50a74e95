"""The bias of an affine projection from a vision tower to a language model, under tensor parallelism.

What is wrong (0.12 to 0.20): MultimodalProjector of the type "affine" is one column-parallel layer that gathers its
output. It is told to return its bias (skip_bias_add), which stays a rank's own part, and the sum of the two raises:
"The size of tensor a (32) must match the size of tensor b (16)".

The patch lets a layer that is cut add its bias itself, before it gathers. On one tensor-parallel rank nothing changes.

Not covered: projectors that were built before shim.apply(). Layers of Transformer Engine cannot gather, so they raise
earlier.

Upstream: not reported.

Delete when: a release adds the bias before it gathers, and those before it are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function

TARGET = "megatron.core.models.vision.multimodal_projector:MultimodalProjector.__init__"


def _init(original: Function) -> Function:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        layer = self.encoder
        if self.projector_type == "affine" and layer.output_size_per_partition < layer.output_size:
            layer.skip_bias_add = False

    return __init__


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {TARGET: _init}
