"""Proofs of fp32-router-counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim import testing
from shim.testing.proof import CannotRunError, Here, proof

MODEL: dict[str, Any] = {
    "num_layers": 1,
    "mtp_num_layers": None,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "none",
    "moe_router_dtype": "fp32",
    "bf16": True,
}
GLOBAL: dict[str, Any] = {
    "moe_router_enable_expert_bias": False,
    "moe_router_score_function": "softmax",
    "moe_router_load_balancing_type": "global_aux_loss",
    "moe_aux_loss_coeff": 0.1,
}
MICROBATCHES = 300


def in_16_bits(model: Any) -> Any:
    from megatron.core.transformer.module import Float16Module

    return Float16Module(model.config, model)


@contextmanager
def noted(model: Any) -> Iterator[list[Tensor]]:
    """The map of tokens and experts, [T, E], of each call of the model's router inside."""
    maps: list[Tensor] = []
    router = model.decoder.layers[0].mlp.router
    handle = router.register_forward_hook(lambda _, __, routed: maps.append(routed[1].bool().clone()))
    from megatron.core.transformer.moe import moe_utils

    # 0.16 looks it up in every step, and has it with Transformer Engine only.
    names = mock.patch.object(moe_utils, "te_general_gemm", None, create=True)
    # A part of the router is compiled on first use, for many seconds.
    with handle, names, torch.compiler.set_stance("force_eager"):
        yield maps


def forward(wrapped: Any, number: int, tokens: int) -> Tensor:
    rows = torch.randint(0, 64, (1, tokens), generator=torch.Generator().manual_seed(number))
    losses: Tensor = wrapped(rows, torch.arange(tokens).expand_as(rows), None, labels=rows.roll(-1, 1))
    return losses.mean()


def miscounted(**options: Any) -> int:
    """Tokens by which the counts of the experts are off after some microbatches. options: of the model."""
    model: Any = testing.build_gpt(**{**MODEL, **options})
    wrapped = in_16_bits(model)
    with noted(model) as maps:
        for number in range(12):
            forward(wrapped, number, 128).backward()
    truth = torch.stack(maps).sum(dim=(0, 1))
    return int((model.decoder.layers[0].mlp.router.local_tokens_per_expert - truth).abs().sum())


@proof("{:.0f} of 3072 tokens miscounted", right="every token counted")
def a_router_of_bf16_counts_its_tokens(here: Here) -> int:
    """A router in a model of bf16 miscounts the tokens of its experts, by which it moves its expert bias.

    To reproduce: build a GPTModel with `num_moe_experts=8`, `moe_router_topk=2`, `moe_router_score_function="sigmoid"`
    and `moe_router_enable_expert_bias=True`, wrap it in Float16Module, and run forward and backward on 12 microbatches
    of 128 tokens. Compare the router's `local_tokens_per_expert` with the sum of its routing maps.

    Float16Module makes the buffer bf16, which holds whole numbers up to 256 and then each second, fourth and so on.
    `_maintain_float32_expert_bias` brings `expert_bias` back to fp32, and not the counts. Right are counts that are
    exact. From 0.12 to 0.19.
    """
    found: int = here.run(miscounted)[0]
    return found


def shares_off() -> float:
    """How far the tokens of an expert in the global auxiliary loss are off, beside those of the mean expert."""
    from megatron.core.transformer.moe.router import TopKRouter

    if not hasattr(TopKRouter, "reset_global_aux_loss_tracker"):
        raise CannotRunError("this release has no global auxiliary loss")
    model: Any = testing.build_gpt(**{**MODEL, **GLOBAL})
    in_16_bits(model)
    router = model.decoder.layers[0].mlp.router
    states = torch.randn(MICROBATCHES, 8, 1, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with noted(model) as maps:
        for microbatch in states:
            router(microbatch)
    truth = torch.stack(maps).sum(dim=(0, 1)) / MICROBATCHES
    return float((router.global_tokens_per_expert / router.ga_steps - truth).abs().max() / truth.mean())


@proof("tokens of an expert off by {:.1%} of the mean", bound=1e-6)
def a_router_of_bf16_counts_its_microbatches(here: Here) -> float:
    """The global auxiliary loss of a model of bf16 has wrong shares of the experts after many microbatches.

    To reproduce: build a GPTModel with `num_moe_experts=8`, `moe_router_topk=2`, a `moe_aux_loss_coeff` and
    `moe_router_load_balancing_type="global_aux_loss"`, wrap it in Float16Module, and give its router 300 microbatches
    of 8 tokens. Compare the router's `global_tokens_per_expert / ga_steps`, from which the loss is made, with the mean
    of its routing maps.

    Both buffers are bf16. `ga_steps` stands still at 256, because bf16 has no 257, and the counts of an expert stand
    still where a microbatch is less than half the distance of two numbers. They begin anew with each step, so this
    needs a step of many microbatches. Right is the mean. From 0.15 to 0.19.
    """
    return float(here.run(shares_off)[0])
