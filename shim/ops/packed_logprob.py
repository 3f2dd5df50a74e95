"""Log-probability and entropy of a packed (THD) row in one call, from a model's output under TP and CP.

The row has T tokens: sequences one after another, in slots with padding (shim.ops.roll). Each of the CP ranks
has t = T / CP of them, cut in zigzag (shim.ops.context_parallel_roll). Each of the TP ranks has its columns of the
vocabulary, for the same tokens.

The results are at the predicting position, like the logits: ``logprob[i]`` is that of the token after
position i, and entropy[i] that of the distribution it is drawn from. So a cut of the row cuts both alike. The last
token of a sequence and the padding predict nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shim._torch_names import outside_graph
from shim.ops._checks import require
from shim.ops.context_parallel_roll import PARTITIONS, rank_roll_index, roll_on_rank
from shim.ops.logprob import TokenLogprobs, linear_token_logprobs, token_logprobs
from shim.ops.roll import lengths_on, packed_roll, slot_of

__all__ = ["PackedLogprobs", "linear_packed_logprobs", "packed_logprobs"]


class PackedLogprobs(NamedTuple):
    """Results per position: [t], or [T] if they were gathered; with a leading 1 if the tokens have it.

    logprob, entropy: fp32 (fp64 for fp64 logits), 0 if the mask is False. `entropy` is None unless asked for.
    mask: bool, True if a token is predicted. 0 stands for a probability of 1, so a mean or a ratio needs the mask.
    """

    logprob: Tensor
    entropy: Tensor | None
    mask: Tensor


def packed_logprobs(
    logits: Tensor,
    tokens: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None = None,
    *,
    tp_group: Any = None,
    cp_group: Any = None,
    temperature: float | Tensor = 1.0,
    entropy: bool | Literal["no_grad"] = False,
    gather: bool | Literal["own_grad"] = False,
    partition: str = "sequence",
    ignore_index: int = -100,
    scratch_bytes: int | None = None,
    chunk_size: int | None = None,
    inplace_backward: bool | Literal["unread"] = False,
) -> PackedLogprobs:
    """The log-probability of each next token of a packed row. Differentiable in the logits, also through the entropy.

    logits: [t, V / TP], [1, t, V / TP] or [t, 1, V / TP], of this rank's tokens and columns.
    tokens: int64 or int32, this rank's cut [t] or the whole row [T]; a leading 1 is allowed. The whole row saves
    the one message to each neighbour. A token equal to ignore_index is not predicted: labels with -100 on the prompts
    leave these out.
    cu_seqlens, cu_seqlens_padded: int32 or int64 [N + 1], of the whole row. Slots are multiples of CP.
    tp_group, cp_group: None if one rank has the whole vocabulary, or the whole row. A group of one rank may be any
    object with rank() and size().
    temperature: a positive number, or a tensor that broadcasts to the [t] tokens of this rank.
    entropy: "no_grad" computes the entropy without a gradient.
    gather: True gathers the results of the whole row on every CP rank, in the row's order. Backward then sums the
    gradients that the CP ranks give to a position, which is the gradient of the sum of their losses: CP times that of a
    loss which each of them computes in full. An average of the gradients over the CP ranks undoes that. "own_grad"
    sums nothing: each rank gets only its gradient, for a loss that is the same on every CP rank.
    partition: how CP cuts, "sequence" (each slot, as attention needs it) or "row" (the row as one piece).
    scratch_bytes, chunk_size, inplace_backward: see token_logprobs.

    The ranks exchange the labels at the edges of the cut (if it was a cut), 3 to 4 numbers a token over TP in forward,
    and nothing in backward. A gather is one all-gather of 2 or 3 numbers a token, and one all-reduce in backward unless
    "own_grad". The host reads nothing back on CUDA, and the number of kernels does not depend on N. torch.compile
    breaks the caller's graph here.

    ValueError for shapes that do not fit and for an unknown partition; also for a row that is shorter than its slots
    and for slots that CP does not divide, on CUDA as a device-side assertion. Other errors are those of token_logprobs.
    """

    of = functools.partial(
        token_logprobs,
        logits,
        tp_group=tp_group,
        entropy=entropy,
        ignore_index=ignore_index,
        scratch_bytes=scratch_bytes,
        chunk_size=chunk_size,
        inplace_backward=inplace_backward,
    )
    compute = _outside_graph if torch.compiler.is_compiling() else _results
    return compute(
        of, temperature, gather, logits, tokens, cu_seqlens, cu_seqlens_padded, cp_group, partition, ignore_index
    )


def linear_packed_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    tp_group: Any = None,
    cp_group: Any = None,
    temperature: float | Tensor = 1.0,
    entropy: bool | Literal["no_grad"] = False,
    gather: bool | Literal["own_grad"] = False,
    partition: str = "sequence",
    ignore_index: int = -100,
    scratch_bytes: int | None = None,
    chunk_size: int | None = None,
    sum_hidden_grad: bool = True,
) -> PackedLogprobs:
    """packed_logprobs of ``hidden @ weight.T + bias``, whose logits exist one tile at a time, never as a whole.

    hidden: [t, H], [1, t, H] or [t, 1, H], of this CP rank's tokens, the same on every TP rank: under sequence
    parallelism gather it first. weight: [V / TP, H], bias: [V / TP]. All three get a gradient if they require one.
    scratch_bytes, chunk_size, sum_hidden_grad: see linear_token_logprobs.

    Other arguments, the result and the errors are those of packed_logprobs.
    """

    of = functools.partial(
        linear_token_logprobs,
        hidden,
        weight,
        bias=bias,
        tp_group=tp_group,
        entropy=entropy,
        ignore_index=ignore_index,
        scratch_bytes=scratch_bytes,
        chunk_size=chunk_size,
        sum_hidden_grad=sum_hidden_grad,
    )
    compute = _outside_graph if torch.compiler.is_compiling() else _results
    return compute(
        of, temperature, gather, hidden, tokens, cu_seqlens, cu_seqlens_padded, cp_group, partition, ignore_index
    )


class _Row:
    """The part that both forms share: the targets of this rank's t positions, and the way back to the whole row.

    target: [t], ignore_index where no token is predicted.
    """

    def __init__(
        self,
        output: Tensor,
        tokens: Tensor,
        cu_seqlens: Tensor,
        cu_seqlens_padded: Tensor | None,
        group: Any,
        partition: str,
        ignore_index: int,
    ) -> None:
        if partition not in PARTITIONS:
            raise ValueError(f"partition is {partition!r}; it must be one of {', '.join(PARTITIONS)}")
        self.leading = output.shape[:-1]  # of the logits or of the hidden states
        self.length = math.prod(self.leading)
        if not 1 <= output.dim() - 1 <= 2 or self.length not in self.leading:
            raise ValueError(f"a packed row has the shape [t, n], [1, t, n] or [t, 1, n], not {list(output.shape)}")
        self.ranks: int = 1 if group is None else group.size()
        self.rank: int = 0 if group is None else group.rank()
        self.group, self.partition = group, partition
        total = self.length * self.ranks
        if tokens.shape[:-1] not in ((), (1,)) or tokens.numel() not in (self.length, total):
            raise ValueError(
                f"tokens have the shape {list(tokens.shape)}; with {self.length} positions on each of {self.ranks} "
                f"context-parallel ranks it must be [{self.length}] or [{total}], with or without a leading 1"
            )
        self.shape = (*tokens.shape[:-1], -1)
        device = output.device
        _, self.slots = lengths_on(device, cu_seqlens, cu_seqlens_padded)
        require(self.slots[-1] <= total, f"cu_seqlens exceeds the row of {total} tokens")
        # A roll puts 0 if a sequence does not continue. Moved by ignore_index, 0 is ignore_index.
        moved = tokens.flatten() - ignore_index
        if self.ranks == 1:
            moved = packed_roll(moved, cu_seqlens, cu_seqlens_padded)
        elif tokens.numel() == total:
            moved = packed_roll(moved, cu_seqlens, cu_seqlens_padded)
            moved = torch.empty_like(moved).index_copy_(0, self.places(), moved).view(self.ranks, -1)[self.rank]
        else:
            given = (cu_seqlens, cu_seqlens_padded, self.length, device, self.rank, self.ranks, partition)
            moved = roll_on_rank(moved, rank_roll_index(*given), 0, group)
        self.target = moved + ignore_index
        self.ignore_index = ignore_index

    def places(self) -> Tensor:
        """For each of the T positions of the row, its place in the shares of all ranks laid end to end. int64 [T]."""
        total = self.length * self.ranks
        # The rest of the row behind the last slot is cut like one more slot.
        end = self.slots.new_full((1,), total)
        pieces = torch.cat([self.slots, end] if self.partition == "sequence" else [torch.zeros_like(end), end])
        require((pieces % self.ranks == 0).all(), f"every slot must be a multiple of the {self.ranks} ranks")
        positions = torch.arange(total, device=pieces.device, dtype=pieces.dtype)
        piece = slot_of(positions, pieces)
        start = pieces[piece]
        share = torch.div(pieces[piece + 1] - start, self.ranks, rounding_mode="floor")
        front = (share + 1) >> 1  # an odd share has the longer front, as in context_parallel_roll
        tail = share - front
        offset = positions - start
        behind = offset - self.ranks * front
        of_front = torch.div(offset, front, rounding_mode="floor")
        of_tail = torch.div(behind, tail.clamp(min=1), rounding_mode="floor")
        is_front = behind < 0
        rank = torch.where(is_front, of_front, self.ranks - 1 - of_tail)
        inside = torch.where(is_front, offset - of_front * front, front + behind - of_tail * tail)
        here = torch.div(start, self.ranks, rounding_mode="floor") + inside
        return rank.long() * self.length + here

    def results(
        self,
        function: Callable[..., TokenLogprobs],
        temperature: float | Tensor,
        gather: bool | Literal["own_grad"],
    ) -> PackedLogprobs:
        if gather not in (False, True, "own_grad"):
            raise ValueError(f"gather is {gather!r}; it must be False, True or 'own_grad'")
        if isinstance(temperature, Tensor):
            temperature = temperature.reshape(-1).expand(self.length).view(self.leading)
        found = function(self.target.view(self.leading), temperature=temperature)
        mask = self.target != self.ignore_index
        rows = [row.reshape(-1) for row in (found.logprob, found.entropy) if row is not None]
        if gather and self.ranks > 1 and self.length:
            *rows, mask = _Gathered.apply(self.places(), self.group, gather is True, *rows, mask.to(rows[0].dtype))
            mask = mask != 0
        logprob, entropy = rows[0], rows[1] if len(rows) > 1 else None
        return PackedLogprobs(
            logprob.view(self.shape), None if entropy is None else entropy.view(self.shape), mask.view(self.shape)
        )


def _results(
    function: Callable[..., TokenLogprobs],
    temperature: float | Tensor,
    gather: bool | Literal["own_grad"],
    *of_row: Any,
) -> PackedLogprobs:
    return _Row(*of_row).results(function, temperature, gather)


_outside_graph = outside_graph(_results)  # it checks values, as token_logprobs does


class _Gathered(torch.autograd.Function):
    """apply(places [T], group, whether to sum gradients over ranks, *rows [t]) -> rows [T], in one message."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, group: Any, sums: bool, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.sums, ctx.dtype = group, sums, rows[0].dtype
        ctx.save_for_backward(places)
        ctx.set_materialize_grads(False)
        mine = torch.stack(rows)
        every = mine.new_empty((group.size() * len(rows), mine.size(1)))
        dist.all_gather_into_tensor(every, mine, group)
        every = every.view(group.size(), *mine.shape)
        found = tuple(every[:, number].reshape(-1).index_select(0, places) for number in range(len(rows)))
        ctx.mark_non_differentiable(*(whole for whole, row in zip(found, rows) if not row.requires_grad))
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *of_rows: Tensor | None) -> Any:
        (places,) = ctx.saved_tensors
        wanted = [number for number, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
        # Every rank sends as many rows, whichever of them its loss reads.
        cut = torch.zeros((len(wanted), places.numel()), dtype=ctx.dtype, device=places.device)
        for row, number in zip(cut, wanted):
            grad = of_rows[number]
            if grad is not None:
                row.index_copy_(0, places, grad)
        if ctx.sums:
            dist.all_reduce(cut, group=ctx.group)
        mine = cut.view(len(wanted), ctx.group.size(), -1)[:, ctx.group.rank()]
        grads: list[Tensor | None] = [None] * len(of_rows)
        for row, number in zip(mine, wanted):
            grads[number] = row
        return None, None, None, *grads
