"""A padded batch that shim.ops packs, as the row that shim.testing runs packed and each sequence alone."""

from dataclasses import dataclass
from typing import Any

import torch

from shim import testing
from shim.ops import Packing, fp8_alignment


@dataclass(frozen=True)
class PackedByOps(testing.PackedRow):
    """A row with the arguments for attention that its packing gives."""

    packing: Any = None
    attend_padding: bool = False

    def packed_seq_params(self, **extra):
        from megatron.core.packed_seq_params import PackedSeqParams

        return PackedSeqParams(**{**self.packing.thd_arguments(attend_padding=self.attend_padding), **extra})


def batch_of(lengths, width, side="left"):
    """ids, labels, mask: [B, S], with random tokens also where there is padding, which nobody may see."""
    tokens = torch.randint(1, 64, (len(lengths), width + 1), generator=torch.Generator().manual_seed(3))
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return tokens[:, :-1], tokens[:, 1:], mask.flip(1) if side == "left" else mask


def row_of(lengths, width, attend_padding=False, **options):
    """(row, packing, ids) of a batch; `options` as for Packing.from_mask."""
    ids, labels, mask = batch_of(lengths, width)
    packing = Packing.from_mask(mask, **options)
    starts, ends = packing.cu_seqlens_padded[:-1].tolist(), packing.cu_seqlens_padded[1:].tolist()
    row = PackedByOps(
        input_ids=packing.pack(ids)[None],
        labels=packing.pack(labels)[None],
        position_ids=packing.positions[None],
        loss_mask=packing.pack(mask.float())[None],
        spans=tuple(zip(starts, lengths)),
        ends=tuple(ends),
        packing=packing,
        attend_padding=attend_padding,
    )
    for number, start in enumerate(starts):
        assert torch.equal(row.input_ids[0, start : start + lengths[number]], ids[number][mask[number]])
    return row, packing, ids


def alignment_of(recipe, layout):
    return fp8_alignment(recipe, layout.tp, layout.cp, layout.sequence_parallel)


def worst_of(model, row):
    """The largest difference of losses and gradients between the packed row and each sequence alone."""
    return testing.worst(testing.differences(testing.run_packed(model, row), testing.run_alone(model, row)))
