"""Proof of fused-linear-logprob."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from shim import testing
from shim.testing import Footprint
from shim.testing.proof import Here, proof

# Large enough that what is worked on at a time is a small part of all.
VOCABULARY, ROWS, LENGTH = 1 << 14, 16, 128


SIZES: dict[str, Any] = {"hidden_size": 16, "ffn_hidden_size": 32, "vocab_size": VOCABULARY}


def gpt_model() -> Any:
    return testing.build_gpt(num_layers=1, mtp_num_layers=1, **SIZES)


def hybrid_model() -> Any:
    """Without Mamba layers, which need their kernels. Before 0.17 the class has the layers of a GPTModel."""
    try:
        from megatron.core.models.mamba.mamba_model import MambaModel
    except ImportError:  # it has been moved
        return testing.build_hybrid("*/*", **SIZES)
    if "hybrid_layer_pattern" in inspect.signature(MambaModel.__init__).parameters:
        return testing.build_hybrid("*/*", **SIZES)
    model: Any = object.__new__(MambaModel)
    vars(model).update(vars(testing.build_gpt(num_layers=1, mtp_num_layers=None, **SIZES)))
    model.position_embedding_type = "none"
    return model


def peak_of_a_step(build: Callable[[], Any], device: str) -> float:
    """The bytes that a step holds at its peak, in units of the logits of one depth."""
    model = build()
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
    return float(here.run(peak_of_a_step, gpt_model, here.device)[0])


@proof("{:.1f} times the bytes of the logits", bound=0.5, defect="memory", options={"fuse": True})
def memory_of_a_step_of_a_hybrid_model(here: Here) -> float:
    """The logits are the largest tensors of a step of a hybrid model, too.

    To reproduce: run the step of the other proof with a MambaModel (HybridModel from 0.18 on) in the place of the
    GPTModel. Attention layers will do: Mamba layers need their kernels, and make no logits.

    The model makes its logits in its own forward. Right is what the other proof asks for. Seen in 0.12 to 0.20.
    """
    return float(here.run(peak_of_a_step, hybrid_model, here.device)[0])
