"""Under context parallelism, padding behind the last sequence of a packed row counts as padding.

What is wrong (2.1 to 2.17), with qkv_format="thd" and cp_comm_type="p2p": DotProductAttention.forward compares real and
padded offsets without their last entries. Padding behind the last sequence alone is not seen, and pad_between_seqs is
False. Each rank then takes the real offsets, divided by the number of ranks. The last sequence loses tokens on one rank
and gets padding as tokens on another: of 13 tokens that are padded to 16, two ranks have 5 and 8, and both attend over
6. Rows behind the 6 have an output of zero.

The patch: if the caller leaves pad_between_seqs out, it is decided from all entries. Transformer Engine then counts
the tokens of each rank. As on stock, each pair of offsets is compared at most once; offsets that are one object are not
compared at all. Nothing changes without context parallelism, with cp_comm_type="a2a", which is right on stock, or with
a pad_between_seqs of the caller's.

- With padding Transformer Engine takes no FlashAttention 2, nor from 2.2 to 2.15 FlashAttention 3. If nothing else can
  run, as on GPUs before Hopper, the patch raises an error with the remedy. On stock the numbers were wrong there.
- 2.1 has no such argument, and keeps the defect.

Upstream: 2.18 (pull request 2898) takes padded offsets for padding unless they are the very objects of the real ones.

Delete when: Transformer Engine 2.17 is not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shim._errors import ShimError
from shim.patches._arguments import Function, argument, replacing

FORWARDS = {
    "v2_2": "transformer_engine.pytorch.attention:DotProductAttention.forward",
    "v2_3": "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention:"
    "DotProductAttention.forward",
}
NO_BACKEND = "No dot product attention backend is available"


class PaddedAttentionError(ShimError, ValueError):
    """No attention of Transformer Engine can run a packed row with padding under context parallelism here."""


def _in_a_ring(attention: Any) -> bool:
    """Whether ranks pass keys and values around: the one kind of context parallelism that asks for padding."""
    group = attention.cp_group
    return attention.cp_comm_type == "p2p" and group is not None and bool(group.size() > 1)


def _differ(real: Tensor | None, padded: Tensor | None) -> bool:
    """Whether sequences with offsets `real`, [sequences + 1], have padding behind them in the row."""
    return real is not None and padded is not None and padded is not real and not torch.equal(padded, real)


def _forward(original: Function) -> Function:
    names = ("qkv_format", "inference_params", "pad_between_seqs")
    qkv_format, inference_params, asked = (argument(original, name) for name in names)
    offsets = [
        (argument(original, f"cu_seqlens_{part}"), argument(original, f"cu_seqlens_{part}_padded"))
        for part in ("q", "kv")
    ]
    with_padding = replacing(original, "pad_between_seqs")

    def decides(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        packed = (qkv_format(args, kwargs) or attention.qkv_format) == "thd"
        return packed and asked(args, kwargs) is None and inference_params(args, kwargs) is None

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not decides(args[0], args, kwargs) or not _in_a_ring(args[0]):
            return original(*args, **kwargs)
        padding = any(_differ(real(args, kwargs), padded(args, kwargs)) for real, padded in offsets)
        args, kwargs = with_padding(args, kwargs, padding)
        try:
            return original(*args, **kwargs)
        except ValueError as error:
            if not padding or NO_BACKEND not in str(error):
                raise
            raise PaddedAttentionError(
                "te-cp-thd-padding: the sequences of this packed row are padded, and no attention backend of this "
                "Transformer Engine takes padding under context parallelism here. FlashAttention 2 does not. Allow "
                "FusedAttention (NVTE_FUSED_ATTN=1, or attention_backend=auto of megatron-core). Or, if attention is "
                "causal, give the padded offsets as cu_seqlens_q and cu_seqlens_kv too, so that padding is attended "
                "over as the end of its sequence"
            ) from error

    return forward


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {FORWARDS[variant]: _forward}
