"""Proofs of clip-norms-without-te."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim.testing.model import ON_CPU
from shim.testing.proof import Here, proof

WIDTH = 16
NO_CONFIG = r"^TypeError: LayerNorm.__init__\(\) got an unexpected keyword argument 'config'"


def tower(kind: str, **norms: Any) -> Any:
    """A tower of one layer, whose norms are torch's by default, as without Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    # As of get_vit_layer_with_local_spec, whose module needs Transformer Engine in 0.12.
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=2, **ON_CPU)
    torch.manual_seed(1)
    classes = {"add_class_token": False, "class_token_len": 0} if kind == "siglip" else {}
    return CLIPViTModel(config, spec, patch_dim=4, img_h=8, img_w=8, model_subtype=kind, **classes, **norms)


def seen(kind: str, **norms: Any) -> Tensor:
    """What the tower makes of an image."""
    found: Tensor = tower(kind, **norms)(torch.ones(1, 3, 8, 8))
    return found


def error(kind: str) -> float:
    """How far a tower by default is from one that is given its norms."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    norms = {"ln_pre_impl": WrappedTorchNorm, "ln_post_impl": WrappedTorchNorm}
    return float((seen(kind, **dict.fromkeys(norms, torch.nn.LayerNorm)) - seen(kind, **norms)).norm())


@proof("output off by {:.1e}", right="the output of a tower with given norms", defect="crash", crashes=NO_CONFIG)
def clip_is_built_without_te(here: Here) -> float:
    """A CLIPViTModel cannot be built without Transformer Engine.

    To reproduce: without Transformer Engine, build CLIPViTModel with layers of a local spec and
    `model_subtype="clip"`: "TypeError: LayerNorm.__init__() got an unexpected keyword argument 'config'". The proof
    gives `torch.nn.LayerNorm`, which is the default there.

    Right is a tower whose output is that of one with `ln_pre_impl=WrappedTorchNorm`. From 0.12 on.
    """
    return here.run(error, "clip")[0]


@proof("output off by {:.1e}", right="the output of a tower with given norms", defect="crash", crashes=NO_CONFIG)
def siglip_is_built_without_te(here: Here) -> float:
    """A CLIPViTModel of the type "siglip" cannot be built without Transformer Engine.

    To reproduce: as above with `model_subtype="siglip"`, without class tokens, and `ln_post_impl`. From 0.12 on.
    """
    return here.run(error, "siglip")[0]
