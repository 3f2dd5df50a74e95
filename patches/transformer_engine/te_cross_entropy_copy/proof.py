"""Proof of te-cross-entropy-copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim.patches.transformer_engine._proof_cross_entropy import cross_entropy
from shim.testing import Footprint
from shim.testing.proof import Here, proof

# Large enough that what is worked on at a time, such as a chunk, is a small part of all.
VOCABULARY, MANY_TOKENS = 1 << 18, {"cpu": 1 << 5, "cuda": 1 << 12}


class Logits(torch.autograd.Function):
    """Logits [s, 1, V] in bf16 of an output layer that keeps nothing for backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: int) -> Tensor:
        return torch.randn(tokens, 1, VOCABULARY, dtype=torch.bfloat16, device=weight.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient[0, 0, :1].float(), None


def peak(device: str) -> float:
    """What a step holds at its peak, its logits included, in units of the logits."""
    tokens = MANY_TOKENS[device]
    weight = torch.zeros(1, device=device, requires_grad=True)
    target = torch.randint(0, VOCABULARY, (tokens, 1), device=device)
    with cross_entropy(device) as function, Footprint() as footprint:
        function(Logits.apply(weight, tokens), target).sum().backward()
    return footprint.peak_bytes / (tokens * VOCABULARY * torch.bfloat16.itemsize)


@proof("{:.1f} times the bytes of the logits", bound=1.5, defect="memory", te=True, devices=("cpu", "cuda"))
def memory_of_the_fused_cross_entropy(here: Here) -> float:
    """TE's fused cross entropy keeps a copy of the logits until backward.

    To reproduce: compute logits in bf16, call `parallel_cross_entropy(logits, target)`, drop the logits, run backward,
    and look at the peak of the memory, with the logits in it.

    2.18 keeps the gradient in fp32, which is twice as large as the logits, and autograd rounds it into a third tensor.
    From 2.19 on it keeps a copy of the logits, unless `overwrite_input=True` is passed. megatron-core passes it nowhere
    (0.12 to 0.20). Right would be the logits alone: the gradient can be computed from them in backward, and be written
    over them if nobody else reads them.
    """
    return float(here.run(peak, here.device)[0])
