"""Proof of sigmoid-aux-loss-precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.testing.proof import Here, proof

EXPERTS, TOPK, TOKENS, COEFFICIENT = 64, 4, 256, 0.1
MODEL: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 16,
    "ffn_hidden_size": 16,
    "mtp_num_layers": None,
    "num_moe_experts": EXPERTS,
    "moe_router_topk": TOPK,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": COEFFICIENT,
}


def logits_of(spread: float, dtype: torch.dtype) -> Tensor:
    """Logits of TOKENS tokens, [s, experts], with a standard deviation of `spread`."""
    drawn = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    return (drawn * spread).to(dtype).requires_grad_()


def router_of(**options: Any) -> Any:
    model: Any = testing.build_gpt(**{**MODEL, **options})
    return model.decoder.layers[0].mlp.router


def gradient(router: Any, logits: Tensor) -> Tensor:
    """The gradient of the auxiliary loss alone for the logits."""
    probabilities, *_ = router.routing(logits[:, None] if logits.dim() == 2 else logits)
    (found,) = torch.autograd.grad((probabilities * 0.0).sum(), logits)
    return found


def right(logits: Tensor, counted: Tensor) -> Tensor:
    """The same in fp64: E / (s^2 k) times coefficient, tokens of an expert and sum of its scores. Equation 4 of Switch
    Transformers, with top-k experts.

    counted: whether the loss counts a token for an expert, [s, experts].
    """
    exact = logits.detach().double().requires_grad_()
    scores = exact.sigmoid() / exact.sigmoid().sum(-1, keepdim=True)
    loss = (scores.sum(0) * counted.sum(0)).sum() * EXPERTS * COEFFICIENT / (TOKENS**2 * TOPK)
    (found,) = torch.autograd.grad(loss, exact)
    return found


def counted_by(router: Any, logits: Tensor) -> Tensor:
    """The experts that the loss of this router counts, [s, experts]: in 0.12 those that get the token."""
    from megatron.core.transformer.moe import moe_utils

    with torch.no_grad():
        if hasattr(moe_utils, "compute_routing_scores_for_aux_loss"):
            return moe_utils.compute_routing_scores_for_aux_loss(logits, TOPK, "sigmoid")[0]
        if testing.release().startswith("0.13."):
            return router.compute_routing_scores_for_aux_loss(logits)[1]
        return router.routing(logits[:, None])[1]


def error(spread: float = 4.0, dtype: torch.dtype = torch.bfloat16) -> float:
    """How far the gradient is from fp64, relative, over all tokens."""
    router, logits = router_of(), logits_of(spread, dtype)
    truth = right(logits, counted_by(router, logits))
    return float((gradient(router, logits).double() - truth).norm() / truth.norm())


@proof("gradient off by {:.1e}", bound=5e-3)
def the_gradient_is_that_of_fp64(here: Here) -> float:
    """With sigmoid scores, the auxiliary loss of MoE is computed in the dtype of the logits.

    To reproduce: build a router with `moe_router_score_function="sigmoid"`, `num_moe_experts=64`, `moe_router_topk=4`,
    `moe_router_load_balancing_type="aux_loss"` and a coefficient. Call `routing` with logits in bf16 with a standard
    deviation of 4, and run backward from the probabilities times zero, so that the gradient is that of the loss alone.
    Compare it with fp64, for the experts that the loss counts.

    From 0.12 to 0.16. Megatron-LM pull request 2765 fixes it in 0.17. The rounding of the gradient to bf16, some 2e-3,
    is left.
    """
    found: float = here.run(error)[0]
    return found
