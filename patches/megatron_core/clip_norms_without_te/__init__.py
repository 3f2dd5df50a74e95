"""The norms of CLIP's and SigLIP's vision towers without Transformer Engine.

What is wrong (0.12 to 0.20): without Transformer Engine the default of CLIPViTModel's norms is `torch.nn.LayerNorm`,
which takes no `config`: a TypeError for the types "clip" and "siglip". LLaVAModel asks for no other norm.

The patch gives the tower the norm that TransformerBlock takes without Transformer Engine: Apex's, or torch's in
megatron-core's wrapper. Another norm that is asked for stays. With Transformer Engine nothing changes.

Upstream: not reported.

Delete when: a release has a default that takes a config, and those before it are not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function, argument, replacing

INIT = "megatron.core.models.vision.clip_vit_model:CLIPViTModel.__init__"
BLOCK = "megatron.core.transformer.transformer_block"


def _init(original: Function) -> Function:
    norms = [(argument(original, name), replacing(original, name)) for name in ("ln_pre_impl", "ln_post_impl")]

    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:
        for norm_of, with_norm in norms:
            if norm_of(args, kwargs) is torch.nn.LayerNorm:
                args, kwargs = with_norm(args, kwargs, sys.modules[BLOCK].LayerNormImpl)
        original(*args, **kwargs)

    return __init__


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {INIT: _init}
