"""Proofs of unwritten-parameters."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from shim import testing
from shim.patches.megatron_core._proof_features import need_option
from shim.testing.cpu import unwritten_memory_is_nan
from shim.testing.proof import Here, LacksFeatureError, proof

MODEL: dict[str, Any] = {"num_layers": 1, "mtp_num_layers": None}
EXPERTS: dict[str, Any] = {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": True}


def unwritten(needed: str = "", **options: Any) -> int:
    """Numbers in the parameters of a new model that nothing has written. needed: a parameter that it has to have."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    with (
        unwritten_memory_is_nan(),
        mock.patch("shim.testing.model._seed_weights"),
        mock.patch("shim.testing.model.CPUCoreAttention", DotProductAttention),
    ):
        model = testing.build_gpt(**MODEL, **options)
    if not any(name.endswith(needed) for name, _ in model.named_parameters()):
        raise LacksFeatureError(f"this release has no {needed}")
    return sum(int(torch.isnan(weight).sum()) for weight in model.parameters())


def of_sinks() -> int:
    need_option("softmax_type", "attention sinks")
    return unwritten(softmax_type="learnable")


@proof("{:.0f} of 4 sinks are not initialised", right="all are")
def attention_sinks_are_initialised(here: Here) -> int:
    """Learnable attention sinks are not initialised.

    To reproduce: with `torch.use_deterministic_algorithms(True)`, which fills memory with NaN that is not initialised,
    build a GPTModel of local layers with `softmax_type="learnable"`, and count NaN in its parameters.

    `DotProductAttention` makes `softmax_offset` by torch.empty. Right is that `init_method` writes it, as from 0.16 on.
    In 0.15.
    """
    found: int = here.run(of_sinks)[0]
    return found


def of_routers() -> int:
    try:
        return unwritten("router.bias", **EXPERTS)
    except AssertionError as error:  # up to 0.14
        if "Bias is not supported for MoE" not in str(error):
            raise
        raise LacksFeatureError("experts of this release have no bias") from error


@proof("{:.0f} of 4 biases are not initialised", right="all are")
def biases_of_routers_are_initialised(here: Here) -> int:
    """The bias of a router is not initialised.

    To reproduce: as above with `num_moe_experts=4` and `add_bias_linear=True`. `Router` makes its bias by torch.empty,
    and reset_parameters initialises the weight alone. In 0.15.
    """
    found: int = here.run(of_routers)[0]
    return found
