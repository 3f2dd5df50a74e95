"""Proof of moe-without-te."""

from __future__ import annotations

from typing import Any

import torch

from shim import testing
from shim.testing.proof import Here, proof

EXPERTS: dict[str, Any] = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"}


@proof(
    "router's product off by {:.1e}",
    bound=1e-6,
    defect="crash",
    crashes=r"^NameError: name 'te_general_gemm' is not defined",
)
def moe_without_te(here: Here) -> float:
    """A model with experts cannot run without Transformer Engine.

    To reproduce: build a GPTModel with `TransformerConfig(num_moe_experts=4, moe_router_topk=2)` and the local layer
    spec in an environment without Transformer Engine, and train one step.

    `megatron/core/transformer/moe/moe_utils.py` imports te_general_gemm inside `try`, and does not set it where that
    fails. RouterGatingLinearFunction asks `te_general_gemm is not None` and raises a NameError. Since 0.17 the name is
    None then, and torch computes the product. Releases from 0.13.0 to 0.16.1 raise; 0.12 has no such function.
    """
    [found] = here.run(error_of_router)
    return float(found)


def error_of_router() -> float:
    """How far the router's logits and gradients are from those in float64, after a whole step of its model."""
    model: Any = testing.build_gpt(num_layers=1, mtp_num_layers=None, **EXPERTS)
    ids = torch.arange(16)[None]
    model(ids, ids, None, labels=ids).mean().backward()
    router = model.decoder.layers[0].mlp.router
    x = torch.randn(16, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    leaves = [x.requires_grad_(), router.weight]
    truth = [leaf.detach().double().requires_grad_() for leaf in leaves]
    results = [router.gating(leaves[0]), truth[0] @ truth[1].T]
    errors = [results[0] - results[1]]
    for one, other in zip(*(torch.autograd.grad(out.square().sum(), of) for out, of in zip(results, (leaves, truth)))):
        errors.append((one - other) / other.abs().max())
    return max(float(error.abs().max()) for error in errors)
