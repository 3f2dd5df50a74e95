"""Proofs of pipeline-p2p-order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shim.patches.megatron_core._proof_pipelines import losses_on_rank
from shim.testing import Layout
from shim.testing.proof import Here, Measured, proof

EQUAL, DIFFERENT = (8, 8, 8, 8), (6, 10, 8, 4)  # tokens of the microbatches
LAYOUT = Layout(pp=2, vp=2)


def compared(here: Here, lengths: Sequence[int], **options: Any) -> Measured:
    """The largest relative difference between losses of two pipeline ranks and those of one rank."""
    (truth,) = here.run(losses_on_rank, lengths, options)
    found = here.run(losses_on_rank, lengths, options, layout=LAYOUT)[-1]
    off = [abs(mine - true) / true for true, mine in zip(truth, found, strict=True)]
    return Measured(float(torch.tensor(off).max()), {"truth": truth, "measured": found})


@proof("losses off by {:.1e}", right="bit-equal", bound=1e-6, ranks=2)
def two_stages_exchange_what_they_are_to_exchange(here: Here) -> Measured:
    """Two pipeline ranks with virtual stages take gradients for activations.

    To reproduce: train a model on two pipeline ranks of two virtual stages each, with `batch_p2p_comm` and without
    `overlap_p2p_comm`, as TransformerConfig has them by default. Compare the losses with those of one rank.

    `_batched_p2p_ops` sends to the previous rank, then to the next one, and receives from the previous rank, then from
    the next one. With two ranks both are the same rank. Messages between two ranks are matched by their order, so the
    gradient for the previous stage arrives as the input of the other rank's stage, and the output as a gradient. Both
    have the same shape. Right would be to send to the next rank first, as `_p2p_ops` does. From 0.12 on (Megatron-LM
    issue 750; megatron.training refuses this layout, megatron-core does not).
    """
    return compared(here, EQUAL)


@proof(
    "losses off by {:.1e}",
    right="bit-equal",
    bound=1e-6,
    ranks=2,
    defect="crash",
    crashes=r"^RuntimeError: (Mismatch in shape: grad_output|The size of tensor a .* must match the size of tensor b)",
)
def shapes_of_two_stages_are_those_of_their_tensors(here: Here) -> Measured:
    """Two pipeline ranks with virtual stages and `variable_seq_lengths` get shapes that belong to other tensors.

    To reproduce: as above, with `variable_seq_lengths` and microbatches of different lengths.

    `_communicate_shapes` sends shapes in the same order, so a stage makes room for a gradient where it is to receive an
    activation. With `batch_p2p_comm` tensors are crossed as shapes are, and the backward pass raises. With
    `batch_p2p_comm=False` tensors have their right order, and do not fit. With `overlap_p2p_comm` both directions have
    separate messages, and all is well. Right would be to send shapes to the next rank first. From 0.12 on
    (Megatron-LM issue 1450).
    """
    return compared(here, DIFFERENT, variable_seq_lengths=True)
