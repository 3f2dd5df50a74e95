"""Proof of hybrid-rotary-interleaved."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from shim import testing
from shim.patches.megatron_core._proof_mamba import module_of_stack
from shim.testing.proof import Here, proof

TOKENS = 16
PAIRS: dict[str, Any] = {"rotary_interleaved": True}


def off_by() -> float:
    """How far the rotary table of a hybrid model is from that of a GPTModel with the same config, in parts of it."""
    if find_spec("megatron.core.models.hybrid") is None:
        module_of_stack()
    hybrid: Any = testing.build_hybrid("*-", **PAIRS)
    gpt: Any = testing.build_gpt(mtp_num_layers=None, **PAIRS)
    found, right = hybrid.rotary_pos_emb(TOKENS), gpt.rotary_pos_emb(TOKENS)
    return float((found - right).norm() / right.norm())


@proof("angles off by {:.1e}")
def a_table_is_made_for_the_rotation_of_attention(here: Here) -> float:
    """With rotary_interleaved a hybrid model rotates by a table that is made for halves.

    To reproduce: build a HybridModel (MambaModel up to 0.17) with attention layers and `rotary_interleaved=True`, and
    compare the table of `model.rotary_pos_emb` with that of a GPTModel of the same config.

    The model makes its RotaryEmbedding without `rotary_interleaved`, and attention rotates pairs: the two numbers of
    each turn by different angles, which is no rotation. From 0.12 to 0.20.
    """
    return float(here.run(off_by)[0])
