"""Causal core attention on CPU: unpacked (sbhd) or packed (thd) rows, with or without context parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

__all__ = ["CPUCoreAttention"]


class _GatherOverRanks(torch.autograd.Function):
    """[t, ...] of every rank -> [ranks * t, ...] on all. Backward sums the ranks' gradients of a shard."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        shards = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(shards, local.contiguous(), group=group)
        return torch.cat(shards)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


def _segments_and_positions(offsets: Tensor, tokens: int, ranks: int, rank: int) -> tuple[Tensor, Tensor]:
    """Segment number [tokens] and position in the segment [tokens] of each token of a rank.

    offsets: int tensor [segments + 1], cumulative lengths of the whole row. tokens: the number on one rank.
    Under context parallelism a segment is cut into 2 * ranks chunks. Rank r holds the r-th chunk from the start
    and the r-th from the end. Tokens after the last offset form one more segment.
    """
    local_offsets = offsets.long() // ranks
    token = torch.arange(tokens, device=offsets.device)
    segment = torch.bucketize(token, local_offsets[1:].contiguous(), right=True)
    # One more segment for the tokens after the last offset.
    starts = local_offsets
    lengths = torch.cat([starts[1:], starts.new_full((1,), tokens)]) - starts
    inside = token - starts[segment]
    if ranks == 1:
        return segment, inside
    chunk = lengths[segment] // 2
    last = 2 * ranks - 1 - rank
    return segment, torch.where(inside < chunk, rank * chunk + inside, last * chunk + inside - chunk)


class CPUCoreAttention(torch.nn.Module):
    """Core attention for a layer spec: causal, grouped queries, no dropout, sbhd or thd.

    Segments follow `cu_seqlens_q_padded` if it is set, else `cu_seqlens_q`, as in Transformer Engine's
    attention. They become one boolean mask [queries, keys]. So the host reads nothing, and memory grows with the
    square of the row, which suits the short rows of tests. The computation is in float64, so the mask costs no
    accuracy: a difference between a packed row and its sequences alone comes from the release.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **ignored: Any,
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **ignored: Any,
    ) -> Tensor:
        """[s, b, heads, d] -> [s, b, heads * d]; packed: [t, heads, d] or [t, 1, heads, d] -> [t, heads * d].

        `key` and `value` may have fewer heads. Attention is always causal: `attention_mask` and
        `attention_bias` are ignored.
        """
        if packed_seq_params is None:
            return self._attend(query, key, value, None)
        offsets = packed_seq_params.cu_seqlens_q_padded
        if offsets is None:
            offsets = packed_seq_params.cu_seqlens_q
        if query.dim() == 3:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        return self._attend(query, key, value, offsets).squeeze(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor | None) -> Tensor:
        """[s, b, heads, d] of this rank -> [s, b, heads * d]."""
        mask = None
        ranks = self.config.context_parallel_size
        if ranks > 1:
            from megatron.core import parallel_state

            group = parallel_state.get_context_parallel_group()
            key, value = _GatherOverRanks.apply(key, group), _GatherOverRanks.apply(value, group)
            mask = self._mask(query, offsets, ranks, group.rank())
        elif offsets is not None:
            mask = self._mask(query, offsets, 1, 0)
        repeats = query.shape[2] // key.shape[2]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2)
        dtype = query.dtype
        query, key, value = (x.permute(1, 2, 0, 3).double() for x in (query, key, value))
        context = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale
        )
        return context.to(dtype).permute(2, 0, 1, 3).flatten(2).contiguous()

    def _mask(self, query: Tensor, offsets: Tensor | None, ranks: int, rank: int) -> Tensor:
        """bool [tokens of this rank, tokens of all ranks in rank order], True if a query may attend to a key."""
        tokens = query.shape[0]
        if offsets is None:
            offsets = torch.tensor([0, tokens * ranks], device=query.device)
        places = [_segments_and_positions(offsets, tokens, ranks, r) for r in range(ranks)]
        segment, position = places[rank]
        key_segment, key_position = (torch.cat(parts) for parts in zip(*places, strict=True))
        return (segment[:, None] == key_segment) & (position[:, None] >= key_position)
