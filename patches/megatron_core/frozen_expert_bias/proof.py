"""Proofs of frozen-expert-bias."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim import testing
from shim.testing.proof import Here, proof

MODEL: dict[str, Any] = {
    "num_layers": 1,
    "mtp_num_layers": None,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
}
QUANTILE: dict[str, Any] = {
    "moe_router_load_balancing_type": "quantile_balancing",
    "moe_router_enable_expert_bias": False,
}
STEPS, ROWS, TOKENS = 20, 4, 64


def step(wrapped: Any) -> Tensor:
    """Forward, backward and finalize_model_grads on the same rows. Returns the experts of each token, [T, E]."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.moe import moe_utils

    rows = torch.randint(0, 64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    places = torch.arange(TOKENS).expand_as(rows)
    router = next(module for module in wrapped.modules() if hasattr(module, "expert_bias"))
    maps: list[Tensor] = []
    handle = router.register_forward_hook(lambda _, __, routed: maps.append(routed[1].bool().clone()))
    wrapped.zero_grad_buffer()
    # 0.16 looks it up in every step, and has it with Transformer Engine only.
    with handle, mock.patch.object(moe_utils, "te_general_gemm", None, create=True):
        wrapped(rows, places, None, labels=rows.roll(-1, 1)).mean().backward()
    finalize_model_grads([wrapped])
    return maps[0]


def rerouted_tokens(**options: Any) -> int:
    """Tokens that go to other experts after some steps in which no weight changes. options: of the model."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    model: Any = testing.build_gpt(**{**MODEL, **options})
    testing.add_lora(model)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    with torch.compiler.set_stance("force_eager"):  # a part of the router is compiled on first use, for many seconds
        before = step(wrapped)
        for _ in range(STEPS - 1):
            step(wrapped)
        after = step(wrapped)
    return int((before != after).any(dim=1).sum())


@proof("{:.0f} of 256 tokens go to other experts", right="each token keeps its experts")
def a_frozen_router_keeps_its_bias(here: Here) -> int:
    """The expert bias of a frozen router keeps moving, so that its tokens go to other experts.

    To reproduce: build a GPTModel with `num_moe_experts=8`, `moe_router_score_function="sigmoid"` and
    `moe_router_enable_expert_bias=True`. Freeze its weights, add adapters, wrap it in DistributedDataParallel, and run
    20 steps of forward, backward and `finalize_model_grads` on the same rows, without changing any weight.

    `_update_router_expert_bias` moves the buffer `expert_bias` of every router, whether its weight is trained or not.
    Adapters do not hold the buffer: the trained adapters fit a model that is saved nowhere. Right is a bias that stays,
    and with it the experts of every token.

    From 0.12 to 0.19. 0.19 has a flag `frozen_expert_bias` of the router, off by default (Megatron-LM pull request
    5019).
    """
    moved: int = here.run(rerouted_tokens)[0]
    return moved


def rerouted_by_quantiles() -> int:
    return rerouted_tokens(**QUANTILE)


@proof("{:.0f} of 256 tokens go to other experts", right="each token keeps its experts", variants=["v0_19"])
def a_frozen_router_keeps_its_quantiles(here: Here) -> int:
    """Quantile balancing moves the bias of a frozen router, so that its tokens go to other experts.

    To reproduce: build a GPTModel with `num_moe_experts=8` and `moe_router_load_balancing_type="quantile_balancing"`.
    Freeze its weights, add adapters, wrap it in DistributedDataParallel, and run 20 steps of forward, backward and
    `finalize_model_grads` on the same rows, without changing any weight.

    `_update_router_qb_beta` moves the buffer `qb_beta` of every router, whether its weight is trained or not, and also
    with `frozen_expert_bias`. Right is a bias that stays, and with it the experts of every token.

    In 0.19.
    """
    moved: int = here.run(rerouted_by_quantiles)[0]
    return moved
