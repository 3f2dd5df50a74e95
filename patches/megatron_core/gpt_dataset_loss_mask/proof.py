"""Proofs of gpt-dataset-loss-mask."""

from __future__ import annotations

import tempfile

from torch import Tensor

from shim.patches.megatron_core._proof_corpus import Tokenizer, gpt_dataset, text_of, write_corpus
from shim.testing.proof import Here, proof

LENGTH, PAD, EOD = 8, 0, 1
DOCUMENTS = [[*range(2, 12), EOD], [*range(12, 28), EOD]]  # three whole rows, and three targets of a fourth


def lost_targets(padded_first: bool) -> int:
    """Targets of two epochs whose place in the loss mask is wrong. padded_first: ask for the row with padding first."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = gpt_dataset(write_corpus(DOCUMENTS, folder), LENGTH, Tokenizer(PAD, EOD))
        order = sorted(range(len(dataset)), key=lambda row: int(trained(dataset, row).sum()), reverse=not padded_first)
        return sum(int((dataset[row]["loss_mask"].bool() != trained(dataset, row)).sum()) for row in [*order, *order])


def trained(dataset: object, row: int) -> Tensor:
    """The loss mask of a row, as it should be."""
    mask: Tensor = text_of(dataset, row)[1:] != PAD
    return mask


@proof("{:.0f} of 54 targets are not trained", right="only padding is not trained")
def the_first_row_leaves_no_padding_in_the_mask(here: Here) -> int:
    """Rows of GPTDataset are not trained at positions at which the first row had padding.

    To reproduce: build a GPTDataset of three and a half rows, with `Split.valid` and
    `drop_last_partial_validation_sequence=False`, so that the last row is padded. Ask for this row first, then for the
    others, and look at `loss_mask`.

    `__getitem__` keeps the loss mask of the first row, and then writes the zeros for padding into it. Right is a mask
    whose zeros are at the padding of its own row.

    From 0.12 on. A tokenizer whose pad id is in the corpus has the same defect in training.
    """
    lost: int = here.run(lost_targets, True)[0]
    return lost


@proof("{:.0f} of 54 targets are not trained", right="only padding is not trained", variants=["v0_12"])
def no_row_leaves_its_padding_in_the_mask(here: Here) -> int:
    """Rows of GPTDataset are not trained at positions at which any earlier row had padding.

    To reproduce: build a GPTDataset of three and a half rows, with `Split.valid` and
    `drop_last_partial_validation_sequence=False`, so that the last row is padded. Ask for all rows in two epochs, and
    look at `loss_mask` of the second.

    `__getitem__` writes the zeros for padding into the loss mask that it keeps for all rows. Right is a mask whose
    zeros are at the padding of its own row.

    From 0.12 to 0.14. 0.15 copies the mask for all rows but the first.
    """
    lost: int = here.run(lost_targets, False)[0]
    return lost
