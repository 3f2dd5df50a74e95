"""Rotary embeddings of packed rows, and their truth, for proofs."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor

HEADS, WIDTH, ROTARY = 2, 64, 32
LENGTHS = (8, 16, 24)  # multiples of four, so that two ranks can cut each by zigzag


class Group:
    """A context-parallel group of one process's imagination."""

    def __init__(self, ranks: int = 1, rank: int = 0) -> None:
        self._ranks, self._rank = ranks, rank

    def size(self) -> int:
        return self._ranks

    def rank(self) -> int:
        return self._rank


def takes(name: str) -> bool:
    """Whether apply_rotary_pos_emb of this release has such an argument."""
    from megatron.core.models.common.embeddings import rope_utils

    return name in inspect.signature(rope_utils.apply_rotary_pos_emb).parameters


@contextmanager
def on_rank(ranks: int = 1, rank: int = 0) -> Iterator[dict[str, Any]]:
    """Lets this process be a context-parallel rank, and gives the argument that says so where there is one."""
    from megatron.core import parallel_state

    with ExitStack() as undo:
        for name, value in (("world_size", ranks), ("rank", rank)):
            told = mock.patch.object(parallel_state, f"get_context_parallel_{name}", lambda value=value: value)
            undo.enter_context(told)
        yield {"cp_group": Group(ranks, rank)} if takes("cp_group") else {}


def places_of(length: int, ranks: int = 1, rank: int = 0) -> list[int]:
    """The positions of a sequence that a rank holds: one half from the front, the other from the back."""
    if ranks == 1:
        return list(range(length))
    half = length // (2 * ranks)
    return [*range(rank * half, (rank + 1) * half), *range(length - (rank + 1) * half, length - rank * half)]


def longest(freqs: Tensor, row_per_token: bool, lengths: Sequence[int] = LENGTHS) -> dict[str, int]:
    """The argument of the longest sequence, if apply_rotary_pos_emb of this release has it.

    A table for positions ends there: in a longer one such a release sees a row for each token.
    """
    return {"max_seqlen": max(lengths) if row_per_token else freqs.size(0)} if takes("max_seqlen") else {}


def config_of(ask: str = "nothing", fused: bool = True) -> Any:
    from megatron.core.transformer import TransformerConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = TransformerConfig(num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS)
    # As trainers do it: what the constructor would refuse is set behind it.
    config.apply_rope_fusion = fused
    config.rotary_interleaved = ask == "interleaved"
    config.multi_latent_attention = ask == "mla"
    return config


def table(rows: int, interleaved: bool = False, device: str = "cpu") -> Tensor:
    """The angles of `rows` positions, [rows, 1, 1, ROTARY]."""
    angles = torch.arange(rows, device=device)[:, None] / torch.arange(1, ROTARY // 2 + 1, device=device)
    twice = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    return twice[:, None, None]


def offsets(lengths: tuple[int, ...] | list[int] = LENGTHS, device: str = "cpu") -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def alone(config: Any, given: Mapping[str, Any], ranks: int = 1, rank: int = 0) -> Tensor:
    """The truth for these arguments, in fp64: each sequence alone, neither packed nor fused."""
    from megatron.core.models.common.embeddings import rope_utils

    config = copy.copy(config)
    config.apply_rope_fusion = False
    how = {name: value for name, value in given.items() if name in ("mscale", "mla_rotary_interleaved", "cp_group")}
    t, freqs = given["t"].double(), given["freqs"].double()
    if given.get("cu_seqlens") is None:
        return rope_utils.apply_rotary_pos_emb(t, freqs, config, **how)
    places = given["cu_seqlens"].tolist()
    per_token = freqs.size(0) == places[-1]
    pieces = []
    for start, end in pairwise(places):
        piece = t[start // ranks : end // ranks, None]
        rows = (freqs[start:end] if per_token else freqs)[places_of(end - start, ranks, rank)]
        pieces.append(rope_utils.apply_rotary_pos_emb(piece, rows, config, **how)[:, 0])
    return torch.cat(pieces)
