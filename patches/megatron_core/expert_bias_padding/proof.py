"""Proofs of expert-bias-padding."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim import testing
from shim.patches.megatron_core._proof_features import need_padding_mask
from shim.testing.proof import Here, proof

MODEL: dict[str, Any] = {
    "num_layers": 1,
    "mtp_num_layers": None,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "none",
}


def counted(tokens: int, padding: int = 0, **options: Any) -> Tensor:
    """How many tokens the router has counted for each expert, [E], in a step on one row that ends in padding."""
    from megatron.core.transformer.moe import moe_utils

    model: Any = testing.build_gpt(**MODEL, **options)
    row = torch.arange(tokens + padding)[None]
    mask = {"padding_mask": row >= tokens} if padding else {}
    # 0.16 looks it up in every step, and has it with Transformer Engine only.
    with mock.patch.object(moe_utils, "te_general_gemm", None, create=True):
        model(row, row, None, labels=row, **mask).mean().backward()
    counts: Tensor = model.decoder.layers[0].mlp.router.local_tokens_per_expert
    return counts


def wrong_counts(tokens: int, padding: int) -> int:
    """Experts whose count is not that of the row without its padding."""
    need_padding_mask()
    with torch.compiler.set_stance("force_eager"):  # a part of the router is compiled on first use, for many seconds
        return int((counted(tokens, padding) != counted(tokens)).sum())


@proof(
    "{:.0f} of 4 experts miscounted",
    right="counts are those without padding",
    defect="crash",
    crashes=r"^RuntimeError: The size of tensor a .* must match the size of tensor b",
)
def a_step_with_a_padding_mask_counts_tokens(here: Here) -> int:
    """A mixture of experts with an expert bias cannot be trained with a padding mask.

    To reproduce: build a GPTModel with `num_moe_experts=4`, `moe_router_score_function="sigmoid"` and
    `moe_router_enable_expert_bias=True`. Run a step on one row of six tokens with a `padding_mask` that is True on the
    last two. TopKRouter._apply_expert_bias combines the mask, one value per token [T], with the map of tokens and
    experts [T, E]: the shapes do not fit, and every such step raises a RuntimeError.

    Right are the counts of the row without its padding, as attention is causal: `local_tokens_per_expert` of both runs
    is the same. The mask has to be a column [T, 1].

    From 0.16 to 0.19. Megatron-LM pull request 6114 fixes it after 0.19.
    """
    wrong: int = here.run(wrong_counts, 4, 2)[0]
    return wrong


@proof("{:.0f} of 4 experts miscounted", right="counts are those without padding")
def padding_does_not_count_for_the_bias(here: Here) -> int:
    """The expert bias silently moves the wrong way if a rank has as many tokens as experts.

    To reproduce: build a GPTModel with `num_moe_experts=4`, `moe_router_score_function="sigmoid"` and
    `moe_router_enable_expert_bias=True`. Run a step on one row of four tokens with a `padding_mask` that is True on the
    last. Compare the router's `local_tokens_per_expert`, by which the bias is moved, with that of the row without its
    padding: attention is causal, so that both have to be the same.

    The mask of tokens [T] fits the map of tokens and experts [T, E] with T = E. TopKRouter._apply_expert_bias then
    leaves out the last expert for every token, instead of the last token for every expert.

    From 0.16 to 0.19. Megatron-LM pull request 6114 fixes it after 0.19.
    """
    wrong: int = here.run(wrong_counts, 3, 1)[0]
    return wrong
