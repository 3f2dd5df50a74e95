"""Attention of a vision transformer with local layers.

What is wrong (0.12 to 0.17): get_vit_layer_with_local_spec makes attention causal, so a patch of an image attends to
itself and to those before it alone. Vision transformers are trained with attention between all patches, and the spec
with Transformer Engine's layers has it. A tower of the local spec sees another picture, in silence.

The patch changes the mask of the spec that is returned. A model that was built before it keeps its attention.

Upstream: right from 0.18 on (Megatron-LM issue 4395).

Delete when: megatron-core 0.17 is not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function

SPEC = "megatron.core.models.vision.vit_layer_specs:get_vit_layer_with_local_spec"


def _get_vit_layer_with_local_spec(original: Function) -> Function:
    @functools.wraps(original)
    def get_vit_layer_with_local_spec(*args: Any, **kwargs: Any) -> Any:
        spec = original(*args, **kwargs)
        masks = sys.modules["megatron.core.transformer.enums"].AttnMaskType
        spec.submodules.self_attention.params["attn_mask_type"] = masks.no_mask
        return spec

    return get_vit_layer_with_local_spec


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {SPEC: _get_vit_layer_with_local_spec}
