"""Proofs of mtp-packed-sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shim import testing
from shim.testing.oracle import Result
from shim.testing.proof import Here, Measured, proof

LENGTHS, ALIGN = (5, 7, 4), 4  # tokens of each sequence, and the multiple to which each is padded
STEPS, RATE = 8, 0.1


def padded_row() -> testing.PackedRow:
    return testing.pack(testing.random_sequences(LENGTHS), align=ALIGN)


def descend(model: nn.Module, result: Result) -> None:
    """One step of SGD with the gradients of a run."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in result.grads:
                weight.sub_(RATE * result.grads[name])


FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def gradient_off(exact: nn.Module, packed: nn.Module) -> float:
    """The error of the gradient of one step on the packed row."""
    row = padded_row()
    right, found = testing.run_alone(exact, row), testing.run_packed(packed, row)
    # Some sources log in another way, which is none of the gradient.
    return testing.differences(replace(found, logged=right.logged), right)["grad"]


def recomputed_gradient() -> float:
    """The larger error under full recompute: of the sequences alone, and of the packed row."""
    row, exact, recomputed = padded_row(), testing.build_gpt(num_layers=1), testing.build_gpt(num_layers=1, **FULL)
    found = []
    if not testing.release().startswith("0.18."):  # where no model recomputes these layers, whatever its rows are
        right, alone = testing.run_alone(exact, row), testing.run_alone(recomputed, row)
        found.append(testing.differences(alone, right)["grad"])
    return max([*found, gradient_off(exact, recomputed)])


def hybrid_gradient() -> float:
    """Of a hybrid model of attention layers, because Mamba layers need their kernels."""
    model = testing.build_hybrid("*/*")
    return gradient_off(model, model)


def two_trainings() -> Measured:
    """The error of the first gradient, and the MTP loss of the sequences alone in both trainings."""
    row, exact, packed = padded_row(), testing.build_gpt(num_layers=1), testing.build_gpt(num_layers=1)
    errors, truth, measured = [], [], []
    for _ in range(STEPS):
        right, found = testing.run_alone(exact, row), testing.run_packed(packed, row)
        # Some sources log in another way, which is none of the gradient.
        errors.append(testing.differences(replace(found, logged=right.logged), right)["grad"])
        truth.append(float(right.logged))
        measured.append(float(testing.run_alone(packed, row).logged))
        descend(exact, right)
        descend(packed, found)
    return Measured(errors[0], {"truth": truth, "measured": measured})


@proof(
    "gradient off by {:.1e}",
    bound=1e-6,
    crashes="AssertionError: .*sequence packing is not yet supported",
    curve="MTP loss",
)
def a_padded_row_trains_like_its_sequences_alone(here: Here) -> Measured:
    """Multi-token prediction trains on the wrong tokens if packed sequences are padded.

    To reproduce: build a GPTModel with `mtp_num_layers=1`. Pack sequences of 5, 7 and 4 tokens into one row, each
    padded to a multiple of 4: `PackedSeqParams(qkv_format="thd")` with `cu_seqlens_q=[0, 5, 12, 16]` and
    `cu_seqlens_q_padded=[0, 8, 16, 20]`, and a loss mask that is zero on padding. Compare the gradient with that of the
    three sequences run one by one, over the same number of counted tokens.

    Attention and rotary embeddings use the padded offsets, but the rolls of multi-token prediction use `cu_seqlens_q`.
    So ids, labels and masks move across the borders of sequences, and the gradient is wrong. It is right without
    padding between sequences, and would be right here if the rolls respected `cu_seqlens_q_padded`.

    From 0.16 to 0.20. Up to 0.15 every packed row is refused by an AssertionError. Megatron-LM pull requests 6205 and
    4494 are open.
    """
    measured: Measured = here.run(two_trainings)[0]
    return measured


@proof(
    "gradient off by {:.1e}",
    bound=1e-6,
    defect="crash",
    crashes=r"AssertionError: .*sequence packing is not yet supported"
    r"|TypeError: (save_for_backward can only save variables|.*_checkpointed_forward\(\) got an unexpected keyword)",
    variants=("v0_14", "v0_16", "v0_17", "v0_18"),
)
def a_padded_row_trains_under_full_recompute(here: Here) -> float:
    """Packed rows crash in multi-token prediction under full recompute.

    To reproduce: build a GPTModel with `mtp_num_layers=1` and `recompute_granularity="full"`,
    `recompute_method="uniform"`, `recompute_num_layers=1`, and run the packed row of the other proof.

    From 0.16 to 0.17 the checkpoint of the MTP layer is given the packed row as an argument to save for backward, which
    takes tensors only. In 0.18 it is given a padding mask that it does not know. Right is the gradient of the sequences
    run one by one without recompute.

    From 0.14 to 0.18. Up to 0.15 every packed row is refused by an AssertionError.
    """
    found: float = here.run(recomputed_gradient)[0]
    return found


@proof("gradient off by {:.1e}", bound=1e-6, variants=("v0_17", "v0_18", "v0_19", "v0_20"))
def a_padded_row_trains_a_hybrid_model(here: Here) -> float:
    """Multi-token prediction of a hybrid model trains on the wrong tokens if packed sequences are padded.

    To reproduce: build a MambaModel (HybridModel from 0.18 on) with `hybrid_layer_pattern="*/*"`, and run the packed
    row of the first proof. Right is the gradient of the sequences run one by one.

    From 0.17, in which the hybrid model got multi-token prediction, to 0.20.
    """
    found: float = here.run(hybrid_gradient)[0]
    return found
