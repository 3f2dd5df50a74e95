"""Rotary positions of packed rows in multi-latent attention of 0.13.

What is wrong (0.13): packed (THD) rows are rotated by a table that is too short, or by offsets that do not fit.
- Under context parallelism the table is cut to the number of tokens on this rank. A sequence that is longer than that
  crashes.
- YaRN cuts its table for this rank first, as for an unpacked row. The longest sequence crashes. If max_seqlen is larger
  than any sequence (at two ranks twice as large), rows get positions of other tokens in silence.
- Offsets are those without padding, also if the row has padded ones: it crashes.

What the patch does: under context parallelism the attention gets the whole table, with as many positions in a row of
it as there are ranks, [L / ranks, ranks, 1, d], so the cut leaves enough for the longest sequence. apply_rotary_pos_emb
gets it with a row for each position again. These are views. Padded offsets take the place of the others, for rotary
positions alone. It leaves alone fused rotary embeddings under context parallelism (YaRN with apply_rope_fusion), whose
kernel in 0.13 knows of no ranks.

Upstream: fixed in 0.14.

Delete when: megatron-core 0.13 is not supported.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shim.patches._arguments import Function, argument, replacing
from shim.patches._views import Called

GET_TENSORS = "megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors"
APPLY = "megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb"

ROPE = "rotary_pos_emb"  # the attribute of the attention


def _whole(embedding: Any, ranks: int) -> Called:
    """In the place of an attention's rotary embedding: calls return the whole table for all ranks, folded."""

    def call(max_seq_len: int, packed_seq: bool = True) -> Any:
        """The table for this many positions, with YaRN also its factor."""
        group, embedding.cp_group = embedding.cp_group, None
        try:
            # The embedding caches by how it is called: upstream's own calls, by position, keep their tables.
            made = embedding(max_seq_len=max_seq_len + -max_seq_len % ranks, offset=0)
        finally:
            embedding.cp_group = group
        table, *rest = made if isinstance(made, tuple) else (made,)
        folded = table.unflatten(0, (-1, ranks)).squeeze(2)
        return (folded, *rest) if rest else folded

    return Called(embedding, call)


def _get_query_key_value_tensors(original: Function) -> Function:
    row_of, with_row = argument(original, "packed_seq_params"), replacing(original, "packed_seq_params")
    inference_of = argument(original, "inference_context")

    @functools.wraps(original)
    def get_query_key_value_tensors(*args: Any, **kwargs: Any) -> Any:
        attention, row = args[0], row_of(args, kwargs)
        if row is None or row.qkv_format != "thd":
            return original(*args, **kwargs)
        args, kwargs = with_row(args, kwargs, _with_padding(row))
        ranks = attention.model_comm_pgs.cp.size()
        if ranks == 1 or inference_of(args, kwargs) is not None:
            return original(*args, **kwargs)
        own = vars(attention)  # not a view's: upstream keeps its checkpoint in the attention
        own[ROPE] = _whole(attention.rotary_pos_emb, ranks)
        try:
            return original(*args, **kwargs)
        finally:
            del own[ROPE]

    return get_query_key_value_tensors


def _with_padding(row: Any) -> Any:
    """The row with its padded offsets, if it has any, in the place of those without padding."""
    padded = {
        name: getattr(row, name + "_padded")
        for name in ("cu_seqlens_q", "cu_seqlens_kv")
        if getattr(row, name + "_padded") is not None
    }
    return dataclasses.replace(row, **padded) if padded else row


def _apply_rotary_pos_emb(original: Function) -> Function:
    table_of, with_table = argument(original, "freqs"), replacing(original, "freqs")
    config_of, offsets_of = argument(original, "config"), argument(original, "cu_seqlens")

    @functools.wraps(original)
    def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
        table: Tensor = table_of(args, kwargs)
        folded = offsets_of(args, kwargs) is not None and table.dim() == 4 and table.shape[1] > 1
        if folded and config_of(args, kwargs).multi_latent_attention:
            args, kwargs = with_table(args, kwargs, table.flatten(0, 1).unsqueeze(1))
        return original(*args, **kwargs)

    return apply_rotary_pos_emb


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {GET_TENSORS: _get_query_key_value_tensors, APPLY: _apply_rotary_pos_emb}
