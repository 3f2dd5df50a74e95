"""Proofs of te-dynamic-cp-group.

The layer is megatron-core's, with all that Transformer Engine's constructor sets. In the place of Transformer Engine's
attention stands one in torch that gathers keys and values over the group that the layer has, by gloo.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from shim import testing
from shim.testing.layout import Layout
from shim.testing.proof import Here, LacksFeatureError, proof

RANKS, TOKENS, HEADS, HEAD = 2, 8, 2, 4


def _attention(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Tensor:
    """Causal attention [s, b, h, d] -> [s, b, h * d] of rows of which each rank of the group has a part, in order."""
    parts, first = [key, value], 0
    if self.cp_group is not None and self.cp_group.size() > 1:
        self.cp_stream.wait_stream(torch.cuda.current_stream())  # as the ring of ranks does
        first = self.cp_group.rank() * len(query)
        for index, part in enumerate(parts):
            gathered = [torch.empty_like(part) for _ in range(self.cp_group.size())]
            torch.distributed.all_gather(gathered, part.contiguous(), group=self.cp_group)
            parts[index] = torch.cat(gathered)
    q, k, v = (part.permute(1, 2, 0, 3) for part in (query, *parts))
    seen = torch.arange(k.shape[2]) <= first + torch.arange(q.shape[2])[:, None]
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).permute(2, 0, 1, 3).flatten(2)


@contextlib.contextmanager
def attention() -> Iterator[Any]:
    """A layer of attention for this layout."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    if "local_cp_size" not in PackedSeqParams.__dataclass_fields__:
        raise LacksFeatureError("this release has no context-parallel groups of batches")
    extensions: Any = import_module("megatron.core.extensions.transformer_engine")
    model: dict[str, Any] = {
        "num_layers": 1,
        "mtp_num_layers": None,
        "num_attention_heads": HEADS,
        "expert_model_parallel_size": 1,
    }
    config: Any = testing.build_gpt(**model).config
    made = {"attn_mask_type": AttnMaskType.causal, "attention_type": "self", "k_channels": HEAD, "v_channels": HEAD}
    base = extensions.TEDotProductAttention.__mro__[1]
    with (
        mock.patch.object(base, "forward", _attention),
        mock.patch.object(extensions.TEDotProductAttention, "cp_stream", None),
        mock.patch("torch.cuda.is_available", lambda: True),
    ):
        yield extensions.TEDotProductAttention(config, layer_number=1, **made)


def attend(layer: Any, part: Tensor, **row: Any) -> Tensor:
    """Of these states as queries, keys and values, [s, b, h, d]. row: the batch's own group, or its local_cp_size."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    packed = PackedSeqParams(qkv_format="sbhd", **row) if row else None
    return layer(part, part, part, None, AttnMaskType.causal, packed_seq_params=packed)


def states(seed: int) -> Tensor:
    return torch.randn(TOKENS, 1, HEADS, HEAD, generator=torch.Generator().manual_seed(seed))


def off(found: Tensor, whole: Tensor, own: slice) -> float:
    """How far the output for some tokens is from that of the whole row in fp64."""
    q = whole.double().permute(1, 2, 0, 3)
    right = functional.scaled_dot_product_attention(q, q, q, is_causal=True).permute(2, 0, 1, 3).flatten(2)[own]
    return float((found - right).norm() / right.norm())


def error_after_a_batch_alone() -> float:
    """Of a row that two ranks share, after a row that each rank had alone."""
    rank = torch.distributed.get_rank()
    with attention() as layer:
        attend(layer, states(rank), local_cp_size=1)
        own = slice(rank * TOKENS // RANKS, (rank + 1) * TOKENS // RANKS)
        return off(attend(layer, states(2)[own]), states(2), own)


def error_of_a_shared_row() -> float:
    """Of a row that two ranks share and bring their group for, in a model without context parallelism."""
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    own = slice(rank * TOKENS // RANKS, (rank + 1) * TOKENS // RANKS)
    with attention() as layer:
        shared = off(attend(layer, states(2)[own], cp_group=group, local_cp_size=RANKS), states(2), own)
        return max(shared, off(attend(layer, states(rank)), states(rank), slice(None)))


@proof("attention off by {:.1e}", bound=1e-5, ranks=RANKS, te=True)
def a_row_behind_one_with_its_own_group(here: Here) -> float:
    """TEDotProductAttention attends over the context-parallel group of an earlier batch.

    To reproduce: on two context-parallel ranks call a TEDotProductAttention with a batch that each rank has alone,
    `PackedSeqParams(qkv_format="sbhd", local_cp_size=1)`, and then with an ordinary one without packed_seq_params, of
    which each rank has a half. Compare with attention of the whole row. (Without a GPU an attention in torch takes the
    place of Transformer Engine's, which gathers keys and values over the layer's `cp_group`.)

    The first call sets no group on the layer and leaves that there, so each rank attends within its half. Right is the
    layer's own group. From 0.16 on; fixed on main by Megatron-LM pull request 5215.
    """
    return max(here.run(error_after_a_batch_alone, layout=Layout(cp=RANKS)))


@proof(
    "attention off by {:.1e}",
    bound=1e-5,
    ranks=RANKS,
    te=True,
    defect="crash",
    crashes=r"^AttributeError: 'NoneType' object has no attribute 'wait_stream'",
)
def a_row_with_a_group_in_a_model_without_context_parallelism(here: Here) -> float:
    """A batch with a context-parallel group raises if the model has context_parallel_size=1.

    To reproduce: on two data-parallel ranks call a TEDotProductAttention with half of a row each and
    `PackedSeqParams(qkv_format="sbhd", cp_group=GROUP, local_cp_size=2)`, as megatron-core's hybrid context
    parallelism does. (Without a GPU an attention in torch takes the place of Transformer Engine's. It waits on
    `cp_stream`, as the ring of ranks does.)

    `TEDotProductAttention.cp_stream` is made by a constructor with context_parallel_size above 1 alone, and is None
    here. Fixed on main by Megatron-LM pull request 6821.
    """
    return max(here.run(error_of_a_shared_row, layout=Layout(tp=1, ep=RANKS)))
