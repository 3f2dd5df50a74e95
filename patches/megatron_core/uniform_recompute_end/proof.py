"""Proof of uniform-recompute-end."""

from __future__ import annotations

from typing import Any

import torch

from shim import testing
from shim.testing.proof import Here, proof

STEPS, RATE = 3, 0.2
CHUNKS_OF_TWO: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 2,
}


def gradients(adapters: bool = False, **options: Any) -> list[dict[str, torch.Tensor]]:
    """The gradients of each step of SGD on a model of three layers.

    adapters: all weights are frozen but for low-rank adapters, and the output of the embeddings requires a gradient.
    """
    model: Any = testing.build_gpt(num_layers=3, mtp_num_layers=None, **options)
    if adapters:
        testing.add_lora(model)
        model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    ids, found = torch.arange(12)[None], []
    for _ in range(STEPS):
        model.zero_grad()
        model(ids, ids, None, labels=ids.roll(-1)).mean().backward()
        found.append({name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None})
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name in found[-1]:
                    weight.sub_(RATE * found[-1][name])
    return found


def unequal(**options: Any) -> int:
    """Over all steps, how many gradients are missing or differ in any bit from those without recompute."""
    right, found = gradients(**options), gradients(**options, **CHUNKS_OF_TWO)
    pairs = [(one.get(name), grad) for one, other in zip(found, right, strict=True) for name, grad in other.items()]
    return sum(one is None or not torch.equal(one, other) for one, other in pairs)


@proof(
    "{:.0f} gradients missing or different",
    right="bit-equal",
    defect="crash",
    crashes=r"^IndexError: index \d+ is out of range",
)
def three_layers_are_recomputed_in_chunks_of_two(here: Here) -> int:
    """Uniform recompute crashes if the layers of a rank are no multiple of recompute_num_layers.

    To reproduce: build a GPTModel with `num_layers=3`, `recompute_granularity="full"`, `recompute_method="uniform"`,
    `recompute_num_layers=2`, and run a step. Forward raises "IndexError: index 3 is out of range".

    `TransformerBlock._checkpointed_forward` steps through the layers in chunks, and does not cut the last one short.
    Right are the gradients without recompute, bit for bit. Fixed in 0.17 by Megatron-LM pull request 3562.
    """
    wrong: int = here.run(unequal)[0]
    return wrong
