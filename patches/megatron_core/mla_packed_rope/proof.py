"""Proofs of mla-packed-rope."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shim.patches.megatron_core import _proof_mla
from shim.testing import Layout, release
from shim.testing.packing import PackedRow, pack, random_sequences
from shim.testing.proof import CannotRunError, Here, proof

RANKS = 2
ALIGN = 2 * RANKS  # what context parallelism cuts a sequence into


def row_and_states(lengths: Sequence[int], align: int = ALIGN) -> tuple[PackedRow, Tensor]:
    """A packed row, and its hidden states [t, 1, h]."""
    row = pack(random_sequences(lengths), align=align)
    states = torch.randn(row.total, 1, _proof_mla.HIDDEN, generator=torch.Generator().manual_seed(3))
    return row, states


def tokens_of_rank(row: PackedRow) -> Tensor:
    """Which tokens of the row this context-parallel rank has."""
    from megatron.core import parallel_state

    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    places: list[Tensor] = []
    for start, end in zip((0, *row.ends[:-1]), row.ends, strict=True):
        chunks = torch.arange(start, end).chunk(2 * ranks) if ranks > 1 else [torch.arange(start, end)]
        places += [chunks[rank], chunks[-1 - rank]] if ranks > 1 else chunks
    return torch.cat(places)


def packed(lengths: Sequence[int], align: int, longest: int | None, settings: dict[str, Any]) -> dict[int, Tensor]:
    """Of each token on this rank that is no padding, what the attention makes of it: [h]."""
    from megatron.core import parallel_state

    ranks = parallel_state.get_context_parallel_world_size()
    row, states = row_and_states(lengths, align)
    extra = {} if longest is None else {"max_seqlen_q": longest, "max_seqlen_kv": longest}
    with _proof_mla.without_te() as module:
        layer = _proof_mla.build(module, context_parallel_size=ranks, **settings)
        mine = tokens_of_rank(row)
        with torch.no_grad():
            made = layer(states[mine], None, packed_seq_params=row.packed_seq_params(**extra))[0].flatten(1)
    return {place: one for place, one in zip(mine.tolist(), made.flatten(1), strict=True) if row.valid[place]}


def alone(lengths: Sequence[int], align: int, settings: dict[str, Any]) -> dict[int, Tensor]:
    """The same of each sequence by itself, unpacked."""
    row, states = row_and_states(lengths, align)
    made = {}
    with _proof_mla.without_te() as module, torch.no_grad():
        layer = _proof_mla.build(module, **settings)
        for start, length in row.spans:
            output = layer(states[start : start + length], None)[0].flatten(1)
            made.update({start + place: one for place, one in enumerate(output)})
    return made


def error(
    here: Here, lengths: Sequence[int], ranks: int = 1, align: int = ALIGN, longest: int | None = None, **settings: Any
) -> float:
    """How far the attention on a packed row is from that on its sequences alone, over the norm of that."""
    if tuple(int(part) for part in release().split(".")[:2]) < (0, 13):
        raise CannotRunError("multi-latent attention of this release takes no packed rows")
    # Ranks first: they are forked, and YaRN's cache keeps layers of this process, with groups that hang where they end.
    found = here.run(packed, lengths, align, longest, settings, layout=Layout(cp=ranks))
    (right,) = here.run(alone, lengths, align, settings)
    together = {place: one for rank in found for place, one in rank.items()}
    assert together.keys() == right.keys()
    wrong = torch.stack([together[place] - right[place] for place in right])
    return float(wrong.norm() / torch.stack(list(right.values())).norm())


@proof(
    "outputs off by {:.1e}",
    bound=1e-5,
    ranks=RANKS,
    defect="crash",
    crashes=r"^RuntimeError: The size of tensor a \(10\) must match the size of tensor b \(5\)",
)
def a_packed_sequence_may_be_longer_than_a_ranks_row(here: Here) -> float:
    """Packed rows of multi-latent attention crash under context parallelism if a sequence is long.

    To reproduce: at context_parallel_size 2 run an MLASelfAttention with `rope_type="rope"` on a packed row of 4, 20
    and 4 tokens: "The size of tensor a (10) must match the size of tensor b (5)".

    get_query_key_value_tensors cuts the table to the 14 tokens of the rank, and the sequence of 20 needs 20 positions.
    Right is each sequence alone. In 0.13. Fixed in 0.14.
    """
    return error(here, [4, 20, 4], ranks=RANKS)


@proof("outputs off by {:.1e}", bound=1e-5, ranks=RANKS)
def packed_rows_get_the_positions_of_yarn(here: Here) -> float:
    """Packed rows of multi-latent attention get wrong positions from YaRN under context parallelism.

    To reproduce: run an MLASelfAttention with `rope_type="yarn"` on a packed row of three sequences of 8 tokens, with
    max_seqlen 16, at context_parallel_size 2.

    YarnRotaryEmbedding cuts its table for the rank, and the packed rotation takes the rank's positions from it once
    more. With max_seqlen 8 it crashes instead. Right is each sequence alone. In 0.13. Fixed in 0.14.
    """
    return error(here, [8, 8, 8], ranks=RANKS, longest=16, rope_type="yarn")


@proof(
    "outputs off by {:.1e}",
    bound=1e-5,
    defect="crash",
    crashes=r"^RuntimeError: split_with_sizes expects split_sizes to sum exactly to 24",
)
def packed_rows_may_have_padding(here: Here) -> float:
    """Packed rows of multi-latent attention crash if sequences are padded.

    To reproduce: run an MLASelfAttention on a packed row of 5, 9 and 2 tokens, each padded to a multiple of four, with
    `cu_seqlens_q_padded` and `cu_seqlens_kv_padded`: "split_with_sizes expects split_sizes to sum exactly to 24".

    get_query_key_value_tensors rotates by the offsets without padding. Right is each sequence alone. In 0.13. Fixed in
    0.14.
    """
    return error(here, [5, 9, 2])
