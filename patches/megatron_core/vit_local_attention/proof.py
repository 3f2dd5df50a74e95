"""Proof of vit-local-attention."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from shim.testing.model import ON_CPU
from shim.testing.proof import CannotRunError, Here, proof

SIZE, PATCH = 8, 4  # pixels: four patches, behind a class token


def tower() -> Any:
    """A vision tower of two local layers."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    try:
        specs: Any = import_module("megatron.core.models.vision.vit_layer_specs")
        clip: Any = import_module("megatron.core.models.vision.clip_vit_model")
    except ImportError as error:
        raise CannotRunError("vision towers of this release need Transformer Engine") from error
    torch.manual_seed(0)
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, **ON_CPU)
    spec = specs.get_vit_layer_with_local_spec()
    model: Any = clip.CLIPViTModel(config, spec, WrappedTorchNorm, patch_dim=PATCH, img_h=SIZE, img_w=SIZE)
    return model.train()


def blind_outputs() -> int:
    """Outputs of the tower that do not change with the last patch of the image."""
    model = tower()
    image = torch.rand(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    other = image.clone()
    other[..., -PATCH:, -PATCH:] += 1.0
    with torch.no_grad():
        change: Tensor = (model(image) - model(other)).abs().amax(-1).flatten()
    return int((change == 0).sum())


@proof("{:.0f} of 5 outputs do not see the last patch", right="all outputs see the last patch")
def every_patch_sees_the_whole_image(here: Here) -> int:
    """A vision transformer with local layers has causal attention.

    To reproduce: build a CLIPViTModel with `get_vit_layer_with_local_spec()`, two layers, images of 8 x 8 pixels and
    patches of 4 x 4, and compare the outputs for two images that differ in the last patch.

    The spec has `AttnMaskType.causal`, that of `get_vit_layer_with_transformer_engine_spec` has `no_mask`. Right is
    that each output changes. From 0.12 to 0.17.
    """
    found: int = here.run(blind_outputs)[0]
    return found


@proof("{:.0f} of 5 outputs do not see the last patch", right="all outputs see the last patch", te=True)
def a_tower_of_0_12_sees_the_whole_image(here: Here) -> int:
    """A vision transformer of 0.12 with local layers has causal attention.

    To reproduce: as above, beside Transformer Engine, without which 0.12 cannot import the module of the spec. Right is
    that each output changes.
    """
    found: int = here.run(blind_outputs)[0]
    return found
