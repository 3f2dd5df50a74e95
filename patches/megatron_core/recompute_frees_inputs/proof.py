"""Proof of recompute-frees-inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.patches.megatron_core._proof_experts import eager
from shim.testing.proof import Here, proof

LAYERS, TOKENS = 4, 64
MODEL: dict[str, Any] = {
    "num_layers": LAYERS,
    "mtp_num_layers": None,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}
UNIFORM: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def step(steps: int = 2, adapters: bool = False, **options: Any) -> tuple[int, int, dict[str, Tensor]]:
    """(bytes held after the last step beside gradients of weights, the most held at a time, gradients).

    adapters: all weights are frozen but for low-rank adapters, and the output of the embeddings requires a gradient.
    """
    model: Any = testing.build_gpt(**{**MODEL, **options})
    if adapters:
        testing.add_lora(model)
        model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    row, grads = torch.arange(TOKENS)[None], {}
    with eager(), testing.Footprint() as footprint:
        for _ in range(steps):
            model(row, row, None, labels=row.roll(-1)).mean().backward()
            grads = {name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None}
            model.zero_grad()
        mine = sum(grad.nbytes for grad in grads.values())
        return footprint.held_bytes - mine, footprint.peak_bytes, grads


def states_held(**options: Any) -> float:
    """How many hidden states are held beside what the same step holds without recompute."""
    without, _, right = step(**options)
    held, _, found = step(**options, **UNIFORM)
    if found.keys() != right.keys() or not all(torch.equal(found[name], right[name]) for name in right):
        raise RuntimeError("recompute has changed gradients")
    return (held - without) / (TOKENS * 32 * 4)


# Probabilities and the like of the routers stay, which are small.
@proof(
    "{:.1f} hidden states held after a step of 4 layers",
    bound=0.2,
    defect="memory",
    options={"release": True},
)
def recomputed_layers_hold_nothing_after_a_step(here: Here) -> float:
    """A mixture of experts under full recompute holds hidden states and their gradients after backward.

    To reproduce: build a GPTModel with four layers, `num_moe_experts=4`, `moe_token_dispatcher_type="alltoall"`,
    `recompute_granularity="full"`, `recompute_method="uniform"`, `recompute_num_layers=1`. Run two steps, drop the
    gradients of the weights, and count the bytes that are held. Beside those of the same model without recompute, each
    layer holds two tensors of the size of its hidden states.

    `CheckpointFunction.backward` runs backward to detached inputs. The token dispatcher keeps a tensor of the
    recomputed graph, whose end are these inputs with their gradients. Right is to hold what is held without recompute.
    Megatron-LM pull requests 3267 and 6339 are about it (open).
    """
    held: float = here.run(states_held)[0]
    return held
