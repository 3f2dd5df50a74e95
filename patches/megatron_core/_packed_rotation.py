"""The rotation of a packed row as a whole, by a row of the table for each token (rope-thd, rope-fusion, mrope-thd).

Three parts of the work are done at three times:

| part | launches | size | done for |
|---|---|---|---|
| the runs of sequences (shim.ops.rope) | six; twenty under CP | one to four for each sequence | the layers of a pass |
| the row of each token | four | a number for each token | queries and keys |
| the gather of the table | one | a row of the table for each token | each rotation |

A pass is a forward pass of a transformer block, or a backward pass that recomputes layers. Nothing that has a number
for each token lives longer than a rotation, except between queries and keys.
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
from shim.ops.rope import Runs, thd_rows, thd_runs
from shim.patches._arguments import Function, argument, by_name, takes
from shim.patches._named import Named

ROPE = "megatron.core.models.common.embeddings.rope_utils:"

# Asked for once, because each rotation of a packed row uses them.
_current_task = find("torch:_C._current_graph_task_id")
_transform = find("torch:_C._functorch.peek_interpreter_stack")

# A rotation needs three temporaries, each as large as its input.
PIECES, PIECE_BYTES = 8, 16 << 20


class OneRank:
    """A context-parallel group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class _Kept(Named, threading.local):
    """What this thread has found for the offsets of packed rows.

    A write to the offsets that torch does not count, as by a kernel or by `.data`, goes unnoticed. So nothing is kept
    from one pass to the next: a trainer may fill the same buffer for each. Within a pass nobody may: on stock, too, the
    layers of a forward would disagree. One backward over several microbatches is one pass, so that checkpoints which
    share a buffer must write to it in ways that torch counts. All is freed with the table or the offsets.
    """

    def __init__(self) -> None:
        # Of the last rotation, for one more: question, version of the table, table, offsets, rows.
        self.rows: list[Any] = []
        # Of the forward pass of a transformer block that runs: [offsets, question, runs] for each offsets.
        self.forward: list[Any] | None = None
        # The same of the backward pass that ran last, and its number. No number comes twice.
        self.backward: list[Any] = []
        self.task = -1

    def of_pass(self) -> list[Any] | None:
        """What has been found in this pass. None if none is known to run."""
        task = _task()
        if self.forward is not None or task == -1:
            return self.forward
        if self.task != task:
            self.task = task
            self.backward.clear()
        return self.backward


_kept = _Kept()


def of_one_pass(original: Function) -> Function:
    """For the forward of a transformer block, whose layers have the same packed row."""
    packed_of = argument(original, "packed_seq_params")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or packed_of(args, kwargs) is None:
            return original(*args, **kwargs)
        found: list[Any] = []
        before, _kept.forward = _kept.forward, found
        _kept.rows.clear()
        try:
            return original(*args, **kwargs)
        finally:
            found.clear()
            _kept.rows.clear()
            _kept.forward = before

    return forward


def gathered(
    freqs: Tensor, cu_seqlens: Tensor, tokens: int, *, cp_size: int, cp_rank: int, row_per_token: bool | None = True
) -> Tensor:
    """What shim.ops.rope.thd_freqs returns for these arguments."""
    question = _question(freqs, cu_seqlens, (tokens, cp_size, cp_rank, row_per_token))
    last = [*_kept.rows]
    _kept.rows.clear()
    first = not last
    if last and last[:2] == [question, freqs._version] and last[2]() is freqs and last[3]() is cu_seqlens:
        return freqs.index_select(0, last[4])
    last.clear()
    # With None the values of the table decide as well, and layers may have tables of their own.
    known = None if question is None or row_per_token is None else _kept.of_pass()
    runs = _found(known or (), cu_seqlens, question)
    if runs is None:
        runs = thd_runs(freqs, cu_seqlens, tokens, cp_size=cp_size, cp_rank=cp_rank, row_per_token=row_per_token)
        if known is not None:
            known.append([*_weakly(known, cu_seqlens), question, runs])
    rows = thd_rows(runs, tokens)
    if question is not None and first:  # else keys have offsets of their own: queries would take none of them
        kept = _kept.rows
        kept += [question, freqs._version, *_weakly(kept, freqs, cu_seqlens), rows]
    return freqs.index_select(0, rows)


def _found(known: Sequence[Any], cu_seqlens: Tensor, question: Hashable) -> Runs | None:
    return next((runs for offsets, asked, runs in known if offsets() is cu_seqlens and asked == question), None)


def _task() -> int:
    """The number of the backward pass that runs in this thread, or -1."""
    return -1 if _current_task is None else int(_current_task())


def _weakly(kept: list[Any], *tensors: Tensor) -> list[Any]:
    """References to tensors, whose end empties `kept`. By them it refers to itself, so its owner empties it."""

    def free(_: Any) -> None:
        kept.clear()

    return [weakref.ref(tensor, free) for tensor in tensors]


def _question(freqs: Tensor, cu_seqlens: Tensor, how: Hashable) -> Hashable:
    """What the runs depend on beside the values of the two tensors. None if nothing must be kept."""
    if torch.compiler.is_compiling() or not (is_plain(freqs) and is_plain(cu_seqlens)):
        return None
    if tracing() or _transform is None or _transform() is not None:
        return None
    if torch.is_inference_mode_enabled() or freqs.is_inference() or cu_seqlens.is_inference():
        return None
    stream = None
    if freqs.device.type == "cuda":
        if capturing():
            return None
        # Another stream does not wait for the kernels of this one.
        stream = torch.cuda.current_stream(freqs.device).cuda_stream
    return how, freqs.size(0), freqs.device, cu_seqlens._version, stream, _task()


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
