"""Proof of fused-linear-logprob."""

from __future__ import annotations

from typing import Any

import torch

from shim import testing
from shim.testing import Footprint
from shim.testing.proof import Here, proof

# Large enough that what is worked on at a time is a small part of all.
VOCABULARY, ROWS, LENGTH = 1 << 14, 16, 128


def peak_of_a_step(device: str) -> float:
    """The bytes that a step holds at its peak, in units of the logits of one depth."""
    model: Any = testing.build_gpt(
        num_layers=1, hidden_size=16, ffn_hidden_size=32, mtp_num_layers=1, vocab_size=VOCABULARY
    )
    rows = torch.arange(ROWS * LENGTH, device=device).view(ROWS, LENGTH)
    model.to(device)
    with Footprint() as footprint:
        model(rows, rows % LENGTH, None, labels=rows + 1).mean().backward()
    return footprint.peak_bytes / (rows.numel() * VOCABULARY * 4)


@proof("{:.1f} times the bytes of the logits", bound=0.5, defect="memory", options={"fuse": True})
def memory_of_a_step(here: Here) -> float:
    """The logits are the largest tensors of a step, and multi-token prediction makes them once more at each depth.

    To reproduce: build a GPTModel with `mtp_num_layers=1` and a vocabulary that is large beside the hidden size, run a
    step with labels, and look at the peak of its memory.

    Each depth holds its logits and their softmax until backward, which adds a gradient. With labels nobody sees the
    logits: the loss of each token, and the gradients of the hidden states and of the output weight, can be computed
    from some tokens and some columns at a time. Seen in 0.12 to 0.20.
    """
    return float(here.run(peak_of_a_step, here.device)[0])
