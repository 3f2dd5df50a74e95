"""Proofs of mtp-router-losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shim import testing
from shim.patches.megatron_core._proof_experts import eager
from shim.testing.proof import Here, LacksFeatureError, proof

EXPERTS: dict[str, Any] = {
    "hidden_size": 16,
    "ffn_hidden_size": 16,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "mtp_loss_scaling_factor": 0.0,
}
AUX: dict[str, Any] = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
Z: dict[str, Any] = {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.1}
DEPTHS = 2


def gpt(**options: Any) -> nn.Module:
    return testing.build_gpt(**{"num_layers": 1, "mtp_num_layers": DEPTHS, **EXPERTS, **options})


def hybrid(pattern: str = "*-/*E/*E", **options: Any) -> nn.Module:
    try:
        return testing.build_hybrid(pattern, **{**EXPERTS, **options})
    except ValueError as error:
        raise LacksFeatureError("hybrid models of this release have no multi-token prediction") from error


def of_router(build: Callable[..., nn.Module], repeated: bool, options: dict[str, Any]) -> Tensor:
    """The gradient of MTP's router by its own loss, over all depths; copies of the layer have its weights."""
    from megatron.core.transformer import TransformerConfig

    if "mtp_use_repeated_layer" not in TransformerConfig.__dataclass_fields__:
        raise LacksFeatureError("models of this release have no layer of multi-token prediction for all depths")
    model: Any = build(mtp_use_repeated_layer=repeated, **options)
    weights = dict(model.mtp.layers[0].named_parameters())
    for layer in model.mtp.layers[1:]:
        for name, weight in layer.named_parameters():
            weight.data.copy_(weights[name])
    row = torch.arange(8)[None]
    with eager():
        (model(row, row, None, labels=row) * 0).sum().backward()
    found = [weight.grad for name, weight in model.mtp.named_parameters() if name.endswith("router.weight")]
    return torch.stack([gradient for gradient in found if gradient is not None]).sum(0)


def error(build: Callable[..., nn.Module], **options: Any) -> float:
    truth = of_router(build, False, options) / DEPTHS
    return float((of_router(build, True, options) - truth).norm() / truth.norm())


def of_hybrid() -> float:
    return error(hybrid, **AUX)


@proof("gradient of MTP's router off by {:.1e}", bound=1e-5)
def a_repeated_hybrid_layer_balances_its_experts_once(here: Here) -> float:
    """Hybrid models balance the experts of a repeated MTP layer once for each depth.

    To reproduce: build the hybrid model with the pattern "*-/*E/*E", `mtp_use_repeated_layer=True`,
    `num_moe_experts=4`, `moe_router_load_balancing_type="aux_loss"`, `moe_aux_loss_coeff=0.1` and
    `mtp_loss_scaling_factor=0.0`, and run backward of zero times its loss, so that the gradient of MTP's router is that
    of its own loss.

    `attach_and_log_load_balancing_loss` divides the loss by `mtp_num_layers` for routers that are `is_mtp_layer`, and
    the stack does not pass this to its layers of experts. Right is the mean of two layers with the same weights. From
    0.17 to 0.19.
    """
    return float(here.run(of_hybrid)[0])


def of_gpt() -> float:
    return error(gpt, **Z)


@proof("gradient of MTP's router off by {:.1e}", bound=1e-5)
def a_repeated_layer_has_the_z_loss_of_one(here: Here) -> float:
    """The z-loss of routers in a repeated MTP layer is divided by the depths in the log only.

    To reproduce: build a GPTModel with `mtp_num_layers=2`, `mtp_use_repeated_layer=True`, `num_moe_experts=4`
    `moe_z_loss_coeff=0.1` and `mtp_loss_scaling_factor=0.0`, and run backward of zero times its loss.

    `apply_z_loss` attaches the loss to the logits and divides it after that. Right is the mean of two layers with the
    same weights. From 0.17 to 0.20.
    """
    return float(here.run(of_gpt)[0])
