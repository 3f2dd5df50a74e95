"""Proofs of clamped-activations."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from shim.patches.megatron_core._proof_experts import step
from shim.testing.proof import Here, LacksFeatureError, proof

MODEL: dict[str, Any] = {
    "num_layers": 1,
    "mtp_num_layers": None,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "activation_func_clamp_value": 0.01,
}
EXPERTS: dict[str, Any] = {"num_moe_experts": 2, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
SHARED: dict[str, Any] = {
    **EXPERTS,
    "moe_shared_expert_intermediate_size": 32,
    "moe_token_dispatcher_type": "alltoall",
}


def trained(options: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token, and the gradients of one step."""
    from megatron.core.transformer import TransformerConfig

    if not hasattr(TransformerConfig, "activation_func_clamp_value"):
        raise LacksFeatureError("this release clamps no activations")
    return step(8, **{**MODEL, **options})


def error(fast: dict[str, Any], options: dict[str, Any]) -> float:
    """How far the gradients of the fast path are from those of the plain one, of their norm."""
    _, truth = trained(options)
    _, found = trained({**options, **fast})
    off = sum(float((found[name] - grad).square().sum()) for name, grad in truth.items())
    return (off / sum(float(grad.square().sum()) for grad in truth.values())) ** 0.5


@proof("gradients off by {:.1e}", right="they are those of the plain path", bound=1e-5)
def fused_swiglu_clamps(here: Here) -> float:
    """bias_activation_fusion ignores activation_func_clamp_value with SwiGLU.

    To reproduce: build a GPTModel with `gated_linear_unit=True`, `activation_func=F.silu` and
    `activation_func_clamp_value=0.01`, once with `bias_activation_fusion=True` and once without. Run a step on the same
    row and compare gradients. `MLP.forward` passes the clamp to fused quick GELU alone. Right is the step without
    fusion, which clamps.

    From 0.15 to 0.19. Megatron-LM pull request 5940 fixes it after 0.19.
    """
    found: float = here.run(error, {"bias_activation_fusion": True}, {})[0]
    return found


@proof("gradients off by {:.1e}", right="they are those of the plain path", bound=1e-5)
def fused_swiglu_of_experts_clamps(here: Here) -> float:
    """bias_activation_fusion ignores activation_func_clamp_value in experts with SwiGLU.

    To reproduce: as in a dense layer, with `num_moe_experts=2` and `moe_router_topk=2`.

    From 0.15 to 0.19. Megatron-LM pull request 5940 fixes it after 0.19.
    """
    found: float = here.run(error, {"bias_activation_fusion": True}, EXPERTS)[0]
    return found


@proof("gradients off by {:.1e}", right="they are those of shared experts that are not overlapped", bound=1e-5)
def overlapped_shared_experts_clamp(here: Here) -> float:
    """moe_shared_expert_overlap ignores activation_func_clamp_value and glu_linear_offset.

    To reproduce: build a GPTModel with `num_moe_experts=2`, `moe_shared_expert_intermediate_size=32`,
    `moe_token_dispatcher_type="alltoall"`, `activation_func=F.silu`, `activation_func_clamp_value=0.01` and
    `glu_linear_offset=1.0`, once with `moe_shared_expert_overlap=True` and once without. Run a step on the same row and
    compare gradients. `SharedExpertMLP.linear_fc1_forward_and_act` has an activation of its own, which reads neither.

    From 0.15 to 0.19. Megatron-LM pull request 5940 fixes it after 0.19.
    """
    found: float = here.run(error, {"moe_shared_expert_overlap": True}, {**SHARED, "glu_linear_offset": 1.0})[0]
    return found
