"""The rotation of a packed row as a whole, by a row of the table for each token (rope-thd, rope-fusion, mrope-thd).

The places of the rows take a dozen launches, and queries and keys take the same rows. So the places that one rotation
has found serve the next one as well, if that has the same offsets.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from shim._torch_names import find
from shim.ops._checks import capturing, is_plain, tracing
from shim.ops.rope import thd_rows
from shim.patches._arguments import Function, by_name, takes

ROPE = "megatron.core.models.common.embeddings.rope_utils:"

# A rotation needs three temporaries, each as large as its input.
PIECES, PIECE_BYTES = 8, 16 << 20


class _Kept(threading.local):
    """The places that the last rotation of this thread has found: [question, freqs, cu_seqlens, rows], or [].

    They serve one more rotation only. Longer, and a write to the offsets that torch does not count, as by a kernel or
    by `.data`, would go unnoticed. They are freed with the table or the offsets: four bytes for each token.
    """

    rows: Sequence[Any] = ()


_kept = _Kept()


def gathered(
    freqs: Tensor, cu_seqlens: Tensor, tokens: int, *, cp_size: int, cp_rank: int, row_per_token: bool | None = True
) -> Tensor:
    """What shim.ops.rope.thd_freqs returns for these arguments."""
    last, _kept.rows = [*_kept.rows], ()
    question = _question(freqs, cu_seqlens, (tokens, cp_size, cp_rank, row_per_token))
    if last and last[0] == question and last[1]() is freqs and last[2]() is cu_seqlens:
        return freqs.index_select(0, last[3])
    rows = thd_rows(freqs, cu_seqlens, tokens, cp_size=cp_size, cp_rank=cp_rank, row_per_token=row_per_token)
    if question is not None:
        _kept.rows = kept = [question]

        def free(_: Any) -> None:
            kept.clear()

        kept += [weakref.ref(freqs, free), weakref.ref(cu_seqlens, free), rows]
    return freqs.index_select(0, rows)


def _question(freqs: Tensor, cu_seqlens: Tensor, how: Hashable) -> Hashable:
    """What the places depend on beside the two tensors themselves. None if they must not be kept."""
    if torch.compiler.is_compiling() or not (is_plain(freqs) and is_plain(cu_seqlens)):
        return None
    transform = find("torch:_C._functorch.peek_interpreter_stack")
    if tracing() or capturing() or transform is None or transform() is not None:
        return None
    if torch.is_inference_mode_enabled() or freqs.is_inference() or cu_seqlens.is_inference():
        return None
    # Another stream does not wait for the kernels of this one.
    stream = torch.cuda.current_stream(freqs.device).cuda_stream if freqs.device.type == "cuda" else None
    return how, freqs._version, cu_seqlens._version, stream


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
        rows = gathered(freqs, cu_seqlens, t.size(0), cp_size=cp_size, cp_rank=cp_rank, row_per_token=row_per_token)
        # The remaining arguments say how to rotate. Upstream names them alike for both formats.
        rotate = functools.partial(upstream["_apply_rotary_pos_emb_bshd"], **given)
        return in_pieces(rotate, t, rows)

    how = inspect.signature(upstream["_apply_rotary_pos_emb_bshd"]).parameters
    takes(_apply_rotary_pos_emb_thd, {"t", "cu_seqlens", "freqs", "cp_group", *how})
    return _apply_rotary_pos_emb_thd
