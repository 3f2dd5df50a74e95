"""Steps on stages of a pipeline, for proofs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shim import testing
from shim.testing.schedules import mean_of_row, run_microbatches

STEPS, RATE = 3, 0.1


def stages(**options: Any) -> list[Any]:
    """The stages of this rank, of a model of 4 layers; batches of messages that wait are upstream's default."""
    if options.get("variable_seq_lengths"):
        options["moe_token_dispatcher_type"] = "alltoall"  # the only one that upstream allows with it
    small = {"num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 32, "mtp_num_layers": None}
    return testing.build_chunks(**{**small, "share_embeddings_and_output_weights": False, **options})


def step(model: Sequence[Any], lengths: Sequence[int]) -> list[float]:
    """The loss of each microbatch in a step of the release's schedule with its update; none on stages without it."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 64, (1, length), generator=generator) for length in lengths]
    logged = run_microbatches(model, rows, mean_of_row, max(lengths))
    with torch.no_grad():
        for weight in (weight for chunk in model for weight in chunk.parameters()):
            if weight.grad is not None:
                weight -= RATE * weight.grad
                weight.grad = None
    return [float(each["loss"]) for each in logged]


def losses_on_rank(lengths: Sequence[int], options: dict[str, Any], steps: int = STEPS) -> list[float]:
    """Losses of the microbatches of some steps."""
    model = stages(**options)
    return [loss for _ in range(steps) for loss in step(model, lengths)]
