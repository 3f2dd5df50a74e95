"""Proof of mtp-gather-gradient."""

from __future__ import annotations

from typing import Any

from shim import testing
from shim.patches.megatron_core._proof_trained_weights import (
    Weights,
    distance,
    trained_weights,
)
from shim.testing import Layout
from shim.testing.proof import Here, proof


def build(sequence_parallel: bool = False, **overrides: Any) -> Any:
    """A model with one layer of multi-token prediction."""
    return testing.build_gpt(num_layers=1, mtp_num_layers=1, sequence_parallel=sequence_parallel, **overrides)


def trained(sequence_parallel: bool) -> Weights:
    return trained_weights(build(sequence_parallel))


def error(here: Here, sequence_parallel: bool) -> float:
    (expected,) = here.run(trained, False)
    return distance(here.run(trained, sequence_parallel, layout=Layout(tp=here.world)), expected)


@proof("weights off by {:.1e}", bound=1e-5, ranks=2)
def multi_token_prediction_trains_as_on_one_rank(here: Here) -> float:
    """Multi-token prediction trains with gradients that are too large by the tensor-parallel size.

    To reproduce: train a GPTModel with `mtp_num_layers=1` on two tensor-parallel ranks, some steps of SGD, and compare
    the weights with those of one rank. `eh_proj.weight` is the first to differ: its gradient is twice as large.

    MultiTokenPredictionLayer.forward gathers the output of eh_proj with
    all_gather_last_dim_from_tensor_parallel_region, whose backward is a reduce-scatter. The gradient is the same on all
    ranks there, so the sum is TP times the gradient. It flows on into the norms before eh_proj, into the embedding and
    into the main model.

    Right is gather_from_tensor_model_parallel_region, whose backward takes the rank's part of the gradient.

    In 0.12. 0.13 has the right gather, by commit 06e9f28b30.
    """
    return error(here, sequence_parallel=False)


@proof("weights off by {:.1e}", bound=1e-5, ranks=2)
def multi_token_prediction_trains_alike_under_sequence_parallelism(here: Here) -> float:
    """The same with `sequence_parallel=True`.

    To reproduce: as without sequence parallelism. The layer scatters the gathered states along the sequence, and the
    backward of that gathers the gradients of all tokens on each rank, so they are also the same on all ranks here.
    """
    return error(here, sequence_parallel=True)
