"""Text as microbatches. A token is a byte; a row has all sequences that fit, each in a slot with padding behind it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shim.ops import Packing

VOCABULARY = 256
# Tokens of a sequence; a document's end is left out. All of one length, because from 0.17 on the weight of multi-token
# prediction depends on the share of a microbatch's tokens that have a target.
LENGTH = 40
SLOT = 16  # slots are multiples of it, as for FP8, and for up to eight context-parallel ranks

Batch = tuple[dict[str, Any], list[int]]  # inputs of the model, and the lengths of all sequences of the row


def rows(max_length: int) -> list[list[Tensor]]:
    """Sequences, int64 [LENGTH + 1] each, as many in a group as fit a row of `max_length` tokens."""
    found: list[Tensor] = []
    for file in sorted(Path(__file__).with_name("text").glob("*.txt")):
        document = torch.tensor(list(file.read_bytes()))
        found += [document[start : start + LENGTH + 1] for start in range(0, len(document) - LENGTH, LENGTH)]
    many = max_length // (-(-LENGTH // SLOT) * SLOT)
    return [found[start : start + many] for start in range(0, len(found), many)]


def batch(row: list[Tensor], max_length: int | None = None, cp: int = 1, cp_rank: int = 0) -> Batch:
    """This rank's share of a packed row of `max_length` tokens; without it, one sequence alone, without padding."""
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths, tokens = [len(sequence) - 1 for sequence in row], pad_sequence(row, batch_first=True)
    slot = {"sequence_alignment": SLOT if max_length else 1, "total": max_length, "cp": cp}
    share = Packing.from_lengths(lengths, max(lengths), **slot).on_rank(cp_rank)
    inputs = {
        "input_ids": share.pack(tokens[:, :-1])[None],
        "labels": share.pack(tokens[:, 1:])[None],
        "position_ids": share.positions[None],
        "loss_mask": share.valid.float()[None],
        "attention_mask": None,
        "packed_seq_params": PackedSeqParams(**share.thd_arguments()) if max_length else None,
    }
    return inputs, lengths
