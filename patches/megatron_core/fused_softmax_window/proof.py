"""Proof of fused-softmax-window."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim.testing.model import ON_CPU
from shim.testing.proof import Here, LacksFeatureError, proof

TOKENS, HEADS, WIDTH = 20, 4, 8


def causal_kernel(scores: Tensor, scale: Tensor) -> Tensor:
    """What scaled_upper_triang_masked_softmax_cuda computes, [heads, s, s]."""
    later = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return (scores.float() * float(scale)).masked_fill(later, float("-inf")).softmax(-1).to(scores.dtype)


KERNELS = {
    "scaled_masked_softmax_cuda": SimpleNamespace(get_batch_per_block=lambda *sizes: HEADS),
    "scaled_upper_triang_masked_softmax_cuda": SimpleNamespace(forward=causal_kernel),
}


def attended(fused: bool, window: tuple[int, int] | None, layer: int = 1, **options: Any) -> Tensor:
    """The output of a layer's attention for one row in bf16, [s, 1, heads * width]."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    given = {**ON_CPU, "masked_softmax_fusion": fused, "bf16": True, "params_dtype": torch.bfloat16, **options}
    config = TransformerConfig(
        num_layers=2, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, window_size=window, **given
    )
    try:
        attention = DotProductAttention(config, layer, AttnMaskType.causal, "self")
    except AssertionError as error:
        raise LacksFeatureError(f"this release has no window there: {error}") from error
    query, key, value = torch.randn(3, TOKENS, 1, HEADS, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    with mock.patch.dict(sys.modules, KERNELS), torch.no_grad():
        found: Tensor = attention(query, key, value, None)
    return found


def off() -> float:
    """How far the outputs with the fused softmax are from those without."""
    return float((attended(True, (3, 0)) - attended(False, (3, 0))).abs().max())


@proof("attention off by {:.1e}", right="a token sees its window", bound=1e-2)
def a_window_holds_beside_the_fused_softmax(here: Here) -> float:
    """masked_softmax_fusion ignores window_size in megatron-core's own attention.

    To reproduce: build DotProductAttention with `window_size=(3, 0)`, `bf16=True` and `masked_softmax_fusion=True`, and
    run it on a row of 20 tokens. Compare with `masked_softmax_fusion=False`. Here the kernels are functions in torch.

    `FusedScaleMaskSoftmax.is_kernel_available` does not look at the window, and the kernel it chooses is causal.
    `forward_torch_softmax` has a mask with the window. Right is a token that sees itself and three before it.

    From 0.15 on.
    """
    found: float = here.run(off)[0]
    return found
