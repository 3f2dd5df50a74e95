"""Packed (THD) rows from token sequences, as a trainer's collator makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["PackedRow", "pack", "random_sequences"]


@dataclass(frozen=True)
class PackedRow:
    """One row of T tokens: sequences side by side, each followed by its padding (id 0, label 0, position 0).

    input_ids, labels, position_ids: int64 [1, T]; positions restart with every sequence.
    loss_mask: float32 [1, T], 0 on padding.
    spans: (first token, length without padding) of every sequence.
    ends: the end of every sequence's padding; the last one is T.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    spans: tuple[tuple[int, int], ...]
    ends: tuple[int, ...]

    @property
    def total(self) -> int:
        """T, padding included."""
        return self.ends[-1]

    @property
    def is_padded(self) -> bool:
        """Whether any sequence is followed by padding."""
        return any(start + length != end for (start, length), end in zip(self.spans, self.ends, strict=True))

    @property
    def valid(self) -> Tensor:
        """bool [T], False on padding."""
        valid = torch.zeros(self.total, dtype=torch.bool)
        for start, length in self.spans:
            valid[start : start + length] = True
        return valid

    def packed_seq_params(self, **extra: Any) -> Any:
        """A new PackedSeqParams: int32 offsets [sequences + 1], the padded ones only if there is padding.

        max_seqlen_* includes padding, because rotary tables have that length. `extra` overrides fields.
        """
        from megatron.core.packed_seq_params import PackedSeqParams

        lengths = [length for _, length in self.spans]
        starts = [start for start, _ in self.spans]
        longest = max(end - start for start, end in zip(starts, self.ends, strict=True))
        fields: dict[str, Any] = {
            "qkv_format": "thd",
            "cu_seqlens_q": _offsets(lengths),
            "cu_seqlens_kv": _offsets(lengths),
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
        }
        if self.is_padded:
            padded = torch.tensor([0, *self.ends], dtype=torch.int32)
            fields["cu_seqlens_q_padded"] = padded
            fields["cu_seqlens_kv_padded"] = padded.clone()
        return PackedSeqParams(**{**fields, **extra})


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def pack(
    sequences: Sequence[Tensor],
    *,
    align: int = 1,
    total: int | None = None,
    loss_masks: Sequence[Tensor] | None = None,
) -> PackedRow:
    """Pack sequences into one row.

    sequences: int64 [n + 1] each; ids are all tokens except the last, labels all except the first; n may be 0.
    align: every sequence is padded to a multiple of this (2 * cp for context parallelism, 16 for FP8).
    total: the number of tokens of the row; the last sequence is padded to fill it.
    loss_masks: [n] per sequence, instead of ones.

    Raises ValueError for no sequences, an empty tensor, a mask of another length, or a `total` that is too
    small.
    """
    if not sequences:
        raise ValueError("nothing to pack")
    if any(sequence.dim() != 1 or len(sequence) == 0 for sequence in sequences):
        raise ValueError("every sequence needs one dimension and at least one token")
    lengths = [len(sequence) - 1 for sequence in sequences]
    masks = loss_masks if loss_masks is not None else [torch.ones(length) for length in lengths]
    if [len(mask) for mask in masks] != lengths:
        raise ValueError(f"loss masks of lengths {[len(mask) for mask in masks]} for sequences of {lengths}")
    ends: list[int] = []
    for length in lengths:
        ends.append((ends[-1] if ends else 0) + -(-length // align) * align)
    if total is not None:
        if total < ends[-1]:
            raise ValueError(f"{ends[-1]} tokens do not fit a row of {total}")
        ends[-1] = total
    starts = [0, *ends[:-1]]
    input_ids, labels, position_ids = (torch.zeros(1, ends[-1], dtype=torch.int64) for _ in range(3))
    loss_mask = torch.zeros(1, ends[-1])
    for start, length, sequence, mask in zip(starts, lengths, sequences, masks, strict=True):
        inside = slice(start, start + length)
        input_ids[0, inside] = sequence[:-1]
        labels[0, inside] = sequence[1:]
        position_ids[0, inside] = torch.arange(length)
        loss_mask[0, inside] = mask.float()
    spans = tuple(zip(starts, lengths, strict=True))
    return PackedRow(input_ids, labels, position_ids, loss_mask, spans, tuple(ends))


def random_sequences(lengths: Sequence[int], vocab_size: int = 64, seed: int = 0) -> list[Tensor]:
    """int64 [n + 1] per length n, of random tokens in [1, vocab_size): id 0 stays for padding."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab_size, (length + 1,), generator=generator) for length in lengths]
