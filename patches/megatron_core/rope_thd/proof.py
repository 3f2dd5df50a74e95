"""Proof of rope-thd."""

from __future__ import annotations

import inspect
from unittest import mock

import torch

from shim.patches.megatron_core._proof_rotations import HEADS, WIDTH, alone, config_of, longest, offsets, on_rank, table
from shim.patches.megatron_core._rotation_tries import Operations
from shim.testing.proof import Here, proof

FEW, MANY, TOKENS = 2, 16, 64
RANKS = ((1, 0), (2, 0), (2, 1))  # of how many context-parallel ranks this is which


def operations_of(sequences: int, device: str) -> int:
    """The operations of rotating a packed row of `sequences` sequences, always of as many tokens in all."""
    from megatron.core.models.common.embeddings import rope_utils

    with on_rank() as group, torch.no_grad():
        config, t = config_of(fused=False), torch.randn(TOKENS, HEADS, WIDTH).to(device)
        cu_seqlens = offsets([TOKENS // sequences] * sequences, device)
        freqs = table(TOKENS + 1, device=device)
        given = {"t": t, "freqs": freqs, "cu_seqlens": cu_seqlens, **longest(freqs, False), **group}
        with Operations() as counted:
            found = rope_utils.apply_rotary_pos_emb(config=config, **given)
        right = alone(config, given)
    if (found - right).norm() > 1e-6 * right.norm():
        raise AssertionError("the rotation is wrong: each sequence alone gives something else")
    return counted.count


def refuse_other_bits(device: str) -> None:
    """Raise if upstream's function rotates to other bits, on one context-parallel rank or two, by each kind of table.

    A table has a row for each position, or for each token of the packed row.
    """
    from megatron.core.models.common.embeddings import rope_utils

    upstream = inspect.unwrap(rope_utils._apply_rotary_pos_emb_thd)
    config, cu_seqlens = config_of(fused=False), offsets([TOKENS // 4] * 4, device)
    for ranks, rank in RANKS:
        t = torch.randn(TOKENS // ranks, HEADS, WIDTH).to(device)
        for rows in (TOKENS + 1, TOKENS):
            with on_rank(ranks, rank) as group:
                freqs = table(rows, device=device)
                given = {"t": t, "freqs": freqs, "cu_seqlens": cu_seqlens, **group}
                given |= longest(freqs, rows == TOKENS, [TOKENS // 4])
                found = rope_utils.apply_rotary_pos_emb(config=config, **given)
                with mock.patch.object(rope_utils, "_apply_rotary_pos_emb_thd", upstream):
                    right = rope_utils.apply_rotary_pos_emb(config=config, **given)
            if not torch.equal(found, right):
                raise AssertionError(f"upstream rotates to other bits on rank {rank} of {ranks}, by {rows} rows")


@proof("{:.1f} operations more for each sequence", right="no operation more", defect="time", devices=("cpu", "cuda"))
def operations_of_a_rotation_for_each_packed_sequence(here: Here) -> float:
    """Unfused rotary embeddings of packed rows loop over the sequences, and read their lengths on the host.

    To reproduce: call `apply_rotary_pos_emb(t, freqs, config, cu_seqlens)` without `config.apply_rope_fusion`, once for
    a row of 64 tokens in two sequences, and once in 16. Count the operations that are dispatched.

    Each sequence is rotated by itself (0.12 to 0.14, and 0.19), or has its own slice of the table (0.15 to 0.18), after
    `cu_seqlens` has been read on the host. One gather of the table's rows for all tokens, and one rotation, would take
    as many operations for any number of sequences. 0.20 does so. Right is such a rotation only to the same bits.
    """
    refuse_other_bits(here.device)
    return (operations_of(MANY, here.device) - operations_of(FEW, here.device)) / (MANY - FEW)
