"""The rotation of a packed row as a whole, by a row of the table for each token (rope-thd, rope-fusion, mrope-thd)."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
from torch import Tensor

from shim.ops.rope import thd_freqs
from shim.patches._arguments import Function, by_name, takes

ROPE = "megatron.core.models.common.embeddings.rope_utils:"

# A rotation needs three temporaries, each as large as its input.
PIECES, PIECE_BYTES = 8, 16 << 20


def in_pieces(rotate: Function, t: Tensor, rows: Tensor) -> Tensor:
    """rotate(t [t, 1, h, d], rows) for t [t, h, d] and a row of the table for each token: [t, h, d].

    Large rows are rotated in a few pieces, so temporaries stay small.
    """
    pieces = min(PIECES, t.numel() * t.element_size() // PIECE_BYTES)
    if pieces < 2:
        whole: Tensor = rotate(t.unsqueeze(1), rows).squeeze(1)
        return whole
    size = -(-t.size(0) // pieces)
    # split instead of slices, because the gradient of a slice is as large as the whole tensor.
    together = zip(t.unsqueeze(1).split(size), rows.split(size), strict=True)
    return torch.cat([rotate(*piece) for piece in together]).squeeze(1)


def rotate_as_one(original: Function, row_per_token: bool | None) -> Function:
    """The replacement of _apply_rotary_pos_emb_thd. `row_per_token`: see shim.ops.rope.thd_freqs."""
    names, named = inspect.signature(original).parameters, by_name(original)
    upstream = vars(sys.modules[ROPE[:-1]])

    @functools.wraps(original)
    def _apply_rotary_pos_emb_thd(*args: Any, **kwargs: Any) -> Any:
        given = named(args, kwargs)
        t, cu_seqlens, freqs = given.pop("t"), given.pop("cu_seqlens"), given.pop("freqs")
        if "cp_group" in names:
            group = given.pop("cp_group", None)
            if group is None:
                raise ValueError("rotating packed rows needs the argument cp_group")
            cp_size, cp_rank = group.size(), group.rank()
        else:
            state = upstream["parallel_state"]
            cp_size, cp_rank = state.get_context_parallel_world_size(), state.get_context_parallel_rank()
        rows = thd_freqs(freqs, cu_seqlens, t.size(0), cp_size=cp_size, cp_rank=cp_rank, row_per_token=row_per_token)
        # The remaining arguments say how to rotate. Upstream names them alike for both formats.
        rotate = functools.partial(upstream["_apply_rotary_pos_emb_bshd"], **given)
        return in_pieces(rotate, t, rows)

    how = inspect.signature(upstream["_apply_rotary_pos_emb_bshd"]).parameters
    takes(_apply_rotary_pos_emb_thd, {"t", "cu_seqlens", "freqs", "cp_group", *how})
    return _apply_rotary_pos_emb_thd
