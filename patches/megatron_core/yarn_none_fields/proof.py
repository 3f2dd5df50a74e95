"""Proof of yarn-none-fields."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import Any

import torch
from torch import Tensor

from shim.testing import CPUCoreAttention
from shim.testing.model import ON_CPU
from shim.testing.proof import Here, proof

TOKENS, BATCH, HIDDEN, HEADS = 6, 2, 16, 2
FIELDS = ("yarn_rotary_scaling_factor", "yarn_mscale", "yarn_mscale_all_dim")


def attended(**fields: Any) -> Tensor:
    """The output of self attention with rotary embeddings, [s, b, h]. `fields`: what the config's class has more."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    kind = make_dataclass(
        "Provider", [(name, Any, value) for name, value in fields.items()], bases=(TransformerConfig,)
    )
    config = kind(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        add_bias_linear=False,
        **ON_CPU,
        apply_rope_fusion=False,
    )
    spec = gpt_layer_specs.get_gpt_layer_local_spec().submodules.self_attention
    spec.submodules.core_attention = CPUCoreAttention
    torch.manual_seed(0)
    layer = build_module(spec, config=config, layer_number=1)
    rotary = RotaryEmbedding(HIDDEN // HEADS, 1.0, use_cpu_initialization=True)(TOKENS)
    hidden = torch.randn(TOKENS, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1))
    output: Tensor = layer(hidden, None, rotary_pos_emb=(rotary, rotary))[0]
    return output.detach()


def wrong_numbers() -> int:
    """How many numbers of the output are others where the config has fields for YaRN that are None."""
    return int((attended(**dict.fromkeys(FIELDS)) != attended()).sum())


@proof(
    "{:.0f} numbers differ",
    right="as without the fields",
    defect="crash",
    crashes=r"^TypeError: '<=' not supported between instances of 'NoneType' and 'int'",
)
def a_config_with_empty_fields_for_yarn_is_one_without_them(here: Here) -> int:
    """Attention crashes if the config has the fields of YaRN and they are None.

    To reproduce: derive a dataclass from TransformerConfig, with the fields `yarn_rotary_scaling_factor`,
    `yarn_mscale` and `yarn_mscale_all_dim`, all None. Build a SelfAttention with it, and run it with rotary
    embeddings.

    _yarn_get_concentration_factor_from_config asks hasattr, and computes the factor of YaRN from None: a TypeError.
    Right is 1.0, as for a config without the fields. From 0.15 to 0.20; earlier releases have no factor there.
    """
    wrong: int = here.run(wrong_numbers)[0]
    return wrong
