"""Proof of mla-without-te."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from shim.testing import CPUCoreAttention
from shim.testing.model import ON_CPU
from shim.testing.proof import CannotRunError, Here, proof

MLA = "megatron.core.transformer.multi_latent_attention"
TOKENS, BATCH, HIDDEN = 6, 2, 32


def build(**overrides: Any) -> Any:
    """Multi-latent attention of the layer spec for local modules."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        multi_latent_attention=True,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_head_dim=8,
        qk_pos_emb_head_dim=8,
        v_head_dim=16,
        rope_type="rope",
        add_bias_linear=False,
        **ON_CPU,
        apply_rope_fusion=False,
        **overrides,
    )
    spec = gpt_layer_specs.get_gpt_layer_local_spec(multi_latent_attention=True).submodules.self_attention
    spec.submodules.core_attention = CPUCoreAttention
    return build_module(spec, config=config, layer_number=1)


def missing_gradients() -> int:
    """Weights of a layer of multi-latent attention that got no gradient in a step."""
    if isinstance(getattr(import_module(MLA), "TELinear", None), type):
        raise CannotRunError("Transformer Engine is installed, and its layers are classes")
    layer = build()
    hidden = torch.randn(TOKENS, BATCH, HIDDEN, generator=torch.Generator().manual_seed(0))
    layer(hidden, None)[0].square().sum().backward()
    return sum(weight.grad is None or not weight.grad.isfinite().all() for weight in layer.parameters())


@proof(
    "{:.0f} weights without a gradient",
    right="all weights have gradients",
    defect="crash",
    crashes=r"^TypeError: isinstance\(\) arg 2",
)
def a_layer_of_local_modules_trains(here: Here) -> int:
    """No model with multi-latent attention can be built without Transformer Engine.

    To reproduce: without Transformer Engine, build the self attention of
    `get_gpt_layer_local_spec(multi_latent_attention=True)`, or a GPTModel with it. MultiLatentAttention.__init__ asks
    isinstance(self.linear_proj, TELinear) and raises a TypeError.

    The module sets HAVE_TE if its imports from megatron.core.extensions.transformer_engine succeed. They do without
    Transformer Engine: that module then derives its layers from mocks, which makes them mocks.

    Right is a layer that trains: no module is a TELinear there.

    In 0.16. Up to 0.15 the question is asked for FP8 alone, and 0.17 takes the right flag, by pull request 3763.
    """
    missing: int = here.run(missing_gradients)[0]
    return missing
