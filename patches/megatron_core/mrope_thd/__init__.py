"""Multimodal rotary positions (mrope) of packed rows.

What is wrong, with position_embedding_type="mrope":

| | under context parallelism | on one rank |
|---|---|---|
| packed rows (THD) | 0.12 to 0.20 | 0.12 to 0.14 |
| unpacked rows | 0.12 | - |

MultimodalRotaryEmbedding.forward cuts its table, a row for each token, for the context-parallel rank, as if the packed
row were one sequence. The rotation of packed rows expects a whole table, and cuts it sequence by sequence. So tokens
take the positions of others, in silence; a sequence that is longer than a rank's part of the row crashes. Up to 0.14
the rotation takes the table's first rows for every sequence, also on one rank. In 0.12 the table is cut in the
dimension of the batch, which raises, or gives wrong rows if the batch can be cut.

The patch: for a packed row the table stays whole, as that of RotaryEmbedding does. From 0.16 on the embedding takes a
context-parallel group of one rank in a call of GPTModel._preprocess with a packed row. _preprocess itself, which may be
a trainer's own, sees the group that it was given. Before, get_pos_emb_on_this_cp_rank cuts nothing in such a call. Up
to 0.14 apply_rotary_pos_emb also takes the token's own row, fused or not, if the config has an mrope_section. On 0.12
dimension 0 is cut. Nothing happens for unpacked rows elsewhere, and for an embedding with another forward.

position_ids are those of the whole packed row, [3, 1, T], as upstream has them for unpacked rows.

Fused rotations (apply_rope_fusion) count positions from the beginning of each sequence, also with this patch, from 0.15
on: rope-fusion fixes that.

Upstream: on the dev branch MultimodalRotaryEmbedding.forward takes packed_seq; the main branch does not.

Delete when: every supported release leaves the table of packed rows whole.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._ambient import Ambient
from shim.patches._arguments import Function, argument, replacing
from shim.patches.megatron_core._packed_rotation import ROPE, OneRank, gathered, in_pieces

GPT = "megatron.core.models.gpt.gpt_model:GPTModel."
EMBEDDING = "megatron.core.models.common.embeddings.rotary_pos_embedding:MultimodalRotaryEmbedding"


_PACKED = Ambient(__name__)  # whether a model is called with a packed row
_EMBEDDING = Ambient(__name__)  # whether upstream's forward of the embedding runs


def _packed(model: Any, packed_seq_params: Any) -> bool:
    """Whether upstream's own multimodal embedding makes the table of a packed row."""
    if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
        return False
    if model.position_embedding_type != "mrope" or model.config.multi_latent_attention:
        return False
    module, _, name = EMBEDDING.partition(":")
    return bool(type(model.rotary_pos_emb).forward is getattr(sys.modules[module], name).forward)


def _of_one_rank_if_packed(original: Function) -> Function:
    """For the forward of the embedding, from 0.16 on."""
    with_group = replacing(original, "cp_group")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if _PACKED.value:
            args, kwargs = with_group(args, kwargs, OneRank())
        return original(*args, **kwargs)

    return forward


def _said_to_be_packed(original: Function) -> Function:
    params_of = argument(original, "packed_seq_params")

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _PACKED.call(_packed(args[0], params_of(args, kwargs)), original, *args, **kwargs)

    return call


def _whole_if_packed(original: Function) -> Function:
    table_of = argument(original, "pos_emb")
    with_dimension = replacing(original, "seq_dim")

    @functools.wraps(original)
    def get_pos_emb_on_this_cp_rank(*args: Any, **kwargs: Any) -> Any:
        if _PACKED.value:
            return table_of(args, kwargs)
        if _EMBEDDING.value:
            args, kwargs = with_dimension(args, kwargs, 0)
        return original(*args, **kwargs)

    return get_pos_emb_on_this_cp_rank


def _cut_in_the_first_dimension(original: Function) -> Function:
    """For the forward of the embedding."""

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return _EMBEDDING.call(True, original, *args, **kwargs)

    return forward


def _row_of_each_token(original: Function) -> Function:
    """For apply_rotary_pos_emb."""
    get = {name: argument(original, name) for name in ("t", "freqs", "config", "cu_seqlens")}
    put = {name: replacing(original, name) for name in ("t", "freqs", "cu_seqlens")}
    upstream = vars(sys.modules[ROPE[:-1]])
    takes_group = "cp_group" in inspect.signature(original).parameters
    group_of = argument(original, "cp_group") if takes_group else lambda args, kwargs: None

    @functools.wraps(original)
    def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
        t, freqs, config, cu_seqlens = (get[name](args, kwargs) for name in get)
        # A single sequence begins with the first row of the table.
        if config.mrope_section is None or cu_seqlens is None or cu_seqlens.numel() <= 2:
            return original(*args, **kwargs)
        group = group_of(args, kwargs)
        group = upstream["parallel_state"].get_context_parallel_group() if group is None else group
        if freqs.size(0) != t.size(0) * group.size():
            return original(*args, **kwargs)
        rows = gathered(freqs, cu_seqlens, t.size(0), cp_size=group.size(), cp_rank=group.rank())

        def rotate(piece: Any, table: Any) -> Any:
            """As an unpacked row of one sequence: [t, 1, h, d], with the table [t, 1, 1, d]."""
            given, named = args, kwargs
            for name, value in (("t", piece), ("freqs", table), ("cu_seqlens", None)):
                given, named = put[name](given, named, value)
            return original(*given, **named)

        if config.apply_rope_fusion:
            return rotate(t.unsqueeze(1), rows).squeeze(1)
        return in_pieces(rotate, t, rows)

    return apply_rotary_pos_emb


def probe(module: Any, method: str, models: list[Any]) -> bool | str:
    """See docs/patch-modules.md. An embedding has no config, and keeps its group from 0.16 on."""
    if getattr(module, "position_embedding_type", "mrope") != "mrope":
        return True
    config, group = getattr(module, "config", None), getattr(module, "cp_group", None)
    if (config is not None and config.context_parallel_size == 1) or (config is None and _is_alone(group)):
        return True  # no table is cut
    return "shim does not try tables that are cut over ranks"


def _is_alone(group: Any) -> bool:
    if group is not None:
        return bool(group.size() == 1)
    state: Any = sys.modules["megatron.core.parallel_state"]
    return not state.model_parallel_is_initialized() or bool(state.get_context_parallel_world_size() == 1)


CUT = {ROPE + "get_pos_emb_on_this_cp_rank": _whole_if_packed}
ROTATED = {ROPE + "apply_rotary_pos_emb": _row_of_each_token}

BINDINGS: dict[str, dict[str, Callable[[Function], Function]]] = {
    "v0_12": {
        GPT + "forward": _said_to_be_packed,
        EMBEDDING + ".forward": _cut_in_the_first_dimension,
        **CUT,
        **ROTATED,
    },
    "v0_13": {GPT + "_preprocess": _said_to_be_packed, **CUT, **ROTATED},
    "v0_15": {GPT + "_preprocess": _said_to_be_packed, **CUT},
    "v0_16": {GPT + "_preprocess": _said_to_be_packed, EMBEDDING + ".forward": _of_one_rank_if_packed},
}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return BINDINGS[variant]
