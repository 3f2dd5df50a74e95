"""Proof of mla-rope-table."""

from __future__ import annotations

import torch

from shim.testing import Layout
from shim.testing.proof import CannotRunError, Here, proof

# The lengths of rows in turn, in units of what ranks cut: some are shorter than one before.
LENGTHS = (12, 4, 16, 2, 4)


def wrong_rows_on_rank(unit: int) -> tuple[int, int]:
    """How many rows of the tables that fused MLA gets are not those of the unfused path, and of how many."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    yarn = YarnRotaryEmbedding(8, original_max_position_embeddings=8 * unit)
    wrong = rows = 0
    for length in LENGTHS:
        cos, sin = yarn.get_cached_cos_sin(length * unit, dtype=torch.float32)
        freqs, mscale = yarn(length * unit)
        mine = torch.cat([cos, sin], -1)[:, 0, 0]
        right = torch.cat([freqs.cos() * mscale, freqs.sin() * mscale], -1)[:, 0, 0]
        wrong += int((mine[: len(right)] != right).any(-1).sum())
        rows += len(right)
    return wrong, rows


@proof("{:.0%} of the positions are others", right="all positions right", ranks=2)
def positions_of_a_row_after_a_longer_one(here: Here) -> float:
    """Fused MLA under context parallelism rotates a row that follows a longer one by positions of other ranks.

    To reproduce on two context-parallel ranks: make a `YarnRotaryEmbedding`, call `get_cached_cos_sin` for a row of 48
    tokens and then for one of 16, as attention does with `config.apply_rope_fusion`. Compare the second table with that
    of the unfused path, `forward(16)`.

    The table of the longest row so far is kept as it was cut for this rank, and a shorter row gets its beginning. But a
    shorter row is cut elsewhere: rank 0 holds positions 0 to 3 and 12 to 15 of 16, and gets 0 to 7. Right would be to
    keep the whole table, and to cut it for each length. Seen from 0.13, the first with fused MLA, to 0.20.
    """
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    if not hasattr(YarnRotaryEmbedding, "get_cached_cos_sin"):
        raise CannotRunError("this release has no fused MLA")
    counts = here.run(wrong_rows_on_rank, 2 * here.world, layout=Layout(cp=here.world))
    wrong, rows = (sum(numbers) for numbers in zip(*counts, strict=True))
    return wrong / rows
