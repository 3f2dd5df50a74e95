"""Proof of recompute-padding-mask."""

from __future__ import annotations

from typing import Any

import torch

from shim import testing
from shim.patches.megatron_core._proof_experts import eager
from shim.patches.megatron_core._proof_features import need_padding_mask
from shim.testing.proof import Here, Measured, proof

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "mtp_num_layers": None,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "share_embeddings_and_output_weights": False,
}
FIRST_LAYER: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
STEPS, RATE, TOKENS, PADDING = 4, 0.5, 10, 6


def training(adapters: bool = False, **options: Any) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """The gradients of each step of SGD on a row that ends in padding, and the norms of those of the last router.

    adapters: all weights are frozen but for low-rank adapters, and the output of the embeddings requires a gradient.
    """
    model: Any = testing.build_gpt(**MODEL, **options)
    if adapters:
        testing.add_lora(model)
        model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    row = torch.arange(TOKENS + PADDING)[None]
    mask, steps, norms = row >= TOKENS, [], []
    for _ in range(STEPS):
        model.zero_grad()
        with eager():
            losses = model(row, row, None, labels=row.roll(-1), padding_mask=mask)
            losses[~mask].mean().backward()
        steps.append({name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None})
        router = model.decoder.layers[-1].mlp.router.weight.grad
        norms.append(0.0 if router is None else float(router.norm()))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name in steps[-1]:
                    weight.sub_(RATE * steps[-1][name])
    return steps, norms


def error(**options: Any) -> Measured:
    """Over all steps, the largest distance of a gradient from that without recompute, relative to its norm."""
    need_padding_mask()
    (right, truth), (found, measured) = training(**options), training(**options, **FIRST_LAYER)
    worst = 0.0
    for one, other in zip(found, right, strict=True):
        assert one.keys() == other.keys()
        pairs = ((one[name], other[name]) for name in other if not torch.equal(one[name], other[name]))
        worst = max([worst, *(float((a - b).norm() / b.norm()) for a, b in pairs)])
    return Measured(worst, {"truth": truth, "measured": measured})


@proof("gradients off by {:.1e}", right="bit-equal", curve="gradient norm of the router")
def layers_that_are_not_recomputed_get_the_padding_mask(here: Here) -> Measured:
    """With recompute of some layers, the routers of the other layers take padding for tokens.

    To reproduce: build a GPTModel with two layers, `num_moe_experts=4`, `moe_router_load_balancing_type="aux_loss"`,
    `moe_aux_loss_coeff=0.1`, `recompute_granularity="full"`, `recompute_method="block"`, `recompute_num_layers=1`.
    Run a step on a row of 16 tokens with a `padding_mask` that is True on the last six, and compare the gradients with
    those without recompute. They differ.

    `TransformerBlock._checkpointed_forward` calls the layers that it does not recompute without the mask. The auxiliary
    loss of the second layer then counts padding. Both runs should have the same gradients, bit for bit. Fixed in 0.18.
    """
    measured: Measured = here.run(error)[0]
    return measured
