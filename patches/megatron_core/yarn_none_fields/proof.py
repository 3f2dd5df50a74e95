"""Proofs of yarn-none-fields."""

from __future__ import annotations

import math
from dataclasses import make_dataclass
from typing import Any

import torch
from torch import Tensor

from shim.testing import CPUCoreAttention
from shim.testing.model import ON_CPU
from shim.testing.proof import CannotRunError, Here, proof

TOKENS, BATCH, HIDDEN, HEADS = 6, 2, 16, 2
SCALING = 32.0  # of gpt-oss
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


def error_of_attention(**fields: Any) -> float:
    """How far attention is from that with a config whose fields say the factor that YaRN has without them."""
    right = attended(**dict(zip(FIELDS, (SCALING, 1.0, 0.0), strict=True)))
    found = attended(yarn_rotary_scaling_factor=SCALING, **fields)
    return float((found - right).norm() / right.norm())


def error_of_empty_fields() -> float:
    return error_of_attention(yarn_mscale=None, yarn_mscale_all_dim=None)


@proof("attention off by {:.1e}", right="bit-equal", variants=("v0_15",))
def yarn_without_mscale_has_its_factor(here: Here) -> float:
    """Attention takes no factor of YaRN from a config that has a scaling factor and no `yarn_mscale`.

    To reproduce: derive a dataclass from TransformerConfig, with the field `yarn_rotary_scaling_factor` of 32.0, as in
    gpt-oss. Build a SelfAttention with it, and run it with rotary embeddings, whose factor is 1.0000.

    `_yarn_get_concentration_factor_from_config` asks for `yarn_mscale` and `yarn_mscale_all_dim` as well, and takes 1.0
    without them. Right is 1.3466, which is 0.1 ln(32) + 1: the factor of the paper, and that of a config whose
    `yarn_mscale` is 1.0 and whose `yarn_mscale_all_dim` is 0.0. In 0.15. Fixed in 0.16 (Megatron-LM pull request 2038).
    """
    off: float = here.run(error_of_attention)[0]
    return off


NO_NUMBER = r"^TypeError: unsupported operand type\(s\) for \*: 'float' and 'NoneType'"


@proof("attention off by {:.1e}", right="bit-equal", defect="crash", crashes=NO_NUMBER, variants=("v0_15",))
def yarn_with_an_empty_mscale_has_its_factor(here: Here) -> float:
    """Attention crashes with a scaling factor of YaRN if `yarn_mscale` and `yarn_mscale_all_dim` are None.

    To reproduce: derive a dataclass from TransformerConfig, with the fields `yarn_rotary_scaling_factor` of 32.0,
    `yarn_mscale` and `yarn_mscale_all_dim`, both None. Build a SelfAttention with it, and run it with rotary
    embeddings: a TypeError.

    Right is 1.3466, which is 0.1 ln(32) + 1. In 0.15. Fixed in 0.16 (Megatron-LM pull request 2038).
    """
    off: float = here.run(error_of_empty_fields)[0]
    return off


def error_of_table() -> float:
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn

    if not hasattr(yarn, "_yarn_get_concentration_factor"):  # up to 0.14
        raise CannotRunError("its table is for multi-latent attention only, whose config has a number in each field")
    empty: Any = None
    table = yarn.YarnRotaryEmbedding(
        HIDDEN // HEADS, use_cpu_initialization=True, scaling_factor=SCALING, mscale=empty, mscale_all_dim=empty
    )
    return abs(float(table(TOKENS)[1]) - (0.1 * math.log(SCALING) + 1))


@proof("factor off by {:.1e}", bound=1e-6, defect="crash", crashes=NO_NUMBER, variants=("v0_15",))
def a_table_of_yarn_with_an_empty_mscale_can_be_built(here: Here) -> float:
    """YarnRotaryEmbedding cannot be built with `mscale` and `mscale_all_dim` None.

    To reproduce: build `YarnRotaryEmbedding(8, scaling_factor=32.0, mscale=None, mscale_all_dim=None)`, as a GPTModel
    with `position_embedding_type="yarn"` does if the fields of its config are None: a TypeError. Right is a table whose
    factor is 0.1 ln(32) + 1. In 0.15. Fixed in 0.16 (Megatron-LM pull request 2038).
    """
    off: float = here.run(error_of_table)[0]
    return off
