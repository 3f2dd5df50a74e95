"""Fused rotary embeddings that ignore what they are asked, and packed rows without a loop.

What is wrong, since when. With apply_rope_fusion, these arguments never reach the fused kernel:

| | unpacked [s, b, h, d] | packed (THD) [t, h, d] |
|---|---|---|
| rotary_interleaved | 0.12.0 | 0.12 to 0.16 |
| mscale (YaRN) | 0.12 to 0.15 | 0.12 to 0.19 |
| interleaving of MLA (config.multi_latent_attention; an argument in 0.19) | 0.12 to 0.18 | 0.12 to 0.19 |
| a table with one row per packed token, with or without context parallelism | - | 0.12 to 0.19 |

The last one: the kernel counts positions from the start of each sequence, the unfused function takes the row of the
token where the table has as many rows as the whole row has tokens (multimodal embeddings), from 0.15 on. Up to 0.14 it
counts too, and only the first sequence is right; there the patch takes the row of the token where in such a table every
sequence begins with the row that the first one begins with.

- Fused MLA under context parallelism (0.13 to 0.19): the table of an unpacked row is a slice of the longest one so far,
  cut short, so that any shorter sequence gets positions of other ranks.
- Unfused packed rows cost a loop over sequences with a host read in each (all releases).

The patch: such a call is made unfused, by upstream's own function with a shallow copy of the config, fusion off; the
config that others read is never written. Where a fused call is wanted and the fused function is missing, upstream's
error stays. Fused MLA gets a table of its own sequence length. Unfused packed rows are rotated as one, by upstream's
function for unpacked ones, with the row of the table gathered for each token (shim.ops.rope): the same bits, forward
and backward. Large rows go in a few pieces, so that temporaries stay as small as a loop over sequences has them.

Not covered:
- fused_single_qkv_rope (0.15 to 0.19) ignores rotary_interleaved and the factor of YaRN. Attention.forward decides on
  it in the middle of its body and calls Transformer Engine itself; it is overridden by the attentions of MLA, which
  shim.check would have to call shadowed. Leave the option off with either of the two.
- Other reads of config.apply_rope_fusion in multi_latent_attention and absorbed_mla: their kernels interleave, have the
  factor of YaRN in the table, and are given the offsets and, from 0.14, the ranks. In 0.13 packed rows of MLA under
  context parallelism are wrong unfused too. DSA forbids fusion; it and dynamic_context call apply_rotary_pos_emb.
- Automodel issue 1439 (a wrong loss, fused, with context parallelism): Automodel calls Transformer Engine itself, and
  the cause is open. With what megatron-core hands over (unpacked: the rank's slice of the table; packed: the whole
  table, size and rank), positions are those of the unfused function.

Upstream: Megatron-LM pull request 5243 (one row per token under context parallelism, unfused); later main rotates
packed rows without a loop. Delete when the fused path refuses what it cannot do, and the releases before that are
not supported.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.ops.rope import thd_freqs
from shim.patches._arguments import Function, argument, replacing, takes

ROPE = "megatron.core.models.common.embeddings.rope_utils:"
YARN = "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding."

# Rotating takes three temporaries of the size of what it rotates.
PIECES, PIECE_BYTES = 8, 16 << 20

INTERLEAVED, MSCALE, MLA, PER_TOKEN = "rotary_interleaved", "mscale", "interleaving of MLA", "a row per token"


def _apply_rotary_pos_emb(original: Function, unpacked: frozenset[str], packed: frozenset[str]) -> Function:
    """`unpacked` and `packed`: what the fused function of each format is not told in this release."""
    get = {name: argument(original, name) for name in ("t", "freqs", "config", "cu_seqlens", "mscale")}
    put_config = replacing(original, "config")
    upstream = vars(sys.modules[ROPE[:-1]])
    cp_size_of, mla_of = _cp_size(original, upstream), _mla(original)

    def wants_the_untold(args: tuple[Any, ...], kwargs: dict[str, Any], config: Any) -> bool:
        cu_seqlens = get["cu_seqlens"](args, kwargs)
        if cu_seqlens is None:
            untold, fused = unpacked, upstream["fused_apply_rotary_pos_emb"]
        else:
            untold, fused = packed, upstream["fused_apply_rotary_pos_emb_thd"]
        if fused is None:
            return False  # upstream says so itself
        if INTERLEAVED in untold and config.rotary_interleaved:
            return True
        if MSCALE in untold and get["mscale"](args, kwargs) != 1.0:
            return True
        if MLA in untold and mla_of(args, kwargs):
            return True
        # One sequence has the same rows either way. Over all ranks there are as many tokens as cu_seqlens ends with.
        if PER_TOKEN not in untold or cu_seqlens is None or cu_seqlens.numel() <= 2:
            return False
        tokens = get["t"](args, kwargs).size(0) * cp_size_of(args, kwargs)
        return bool(get["freqs"](args, kwargs).size(0) == tokens)

    @functools.wraps(original)
    def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
        config = get["config"](args, kwargs)
        if config.apply_rope_fusion and wants_the_untold(args, kwargs, config):
            args, kwargs = put_config(args, kwargs, _with(config, apply_rope_fusion=False))
        return original(*args, **kwargs)

    return apply_rotary_pos_emb


def _with(config: Any, **fields: Any) -> Any:
    """A shallow copy of `config`, which others share, with other values for `fields`."""
    config = copy.copy(config)
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def _mla(original: Function) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """A getter for whether a call asks for the interleaving of MLA: by an argument from 0.19, else by the config."""
    config_of = argument(original, "config")
    if "mla_rotary_interleaved" not in inspect.signature(original).parameters:
        return lambda args, kwargs: config_of(args, kwargs).multi_latent_attention
    flag_of = argument(original, "mla_rotary_interleaved")

    def get(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flag = flag_of(args, kwargs)
        return config_of(args, kwargs).multi_latent_attention if flag is None else flag

    return get


def _cp_size(original: Function, upstream: dict[str, Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], int]:
    """A getter for the number of context-parallel ranks of a call. `upstream`: the namespace of its module."""
    if "cp_group" not in inspect.signature(original).parameters:
        return lambda args, kwargs: upstream["parallel_state"].get_context_parallel_world_size()
    group_of = argument(original, "cp_group")

    def get(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        group = group_of(args, kwargs)
        return (upstream["parallel_state"].get_context_parallel_group() if group is None else group).size()

    return get


def _apply_rotary_pos_emb_thd(original: Function, row_per_token: bool | None) -> Function:
    """`row_per_token`: True where this release takes a table as long as the row for one with a row per token, and None
    where it is to do so only for a table that says so itself."""
    names = list(inspect.signature(original).parameters)
    upstream = vars(sys.modules[ROPE[:-1]])

    @functools.wraps(original)
    def _apply_rotary_pos_emb_thd(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args)), **kwargs}
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
        # What is left of the arguments says how to rotate, in upstream's own words for both formats.
        rotate = functools.partial(upstream["_apply_rotary_pos_emb_bshd"], **given)
        pieces = min(PIECES, t.numel() * t.element_size() // PIECE_BYTES)
        if pieces < 2:
            return rotate(t.unsqueeze(1), rows).squeeze(1)
        size = -(-t.size(0) // pieces)
        # split, not slices: the gradient of a slice is as large as the whole.
        together = zip(t.unsqueeze(1).split(size), rows.split(size), strict=True)
        return torch.cat([rotate(*piece) for piece in together]).squeeze(1)

    how = inspect.signature(upstream["_apply_rotary_pos_emb_bshd"]).parameters
    takes(_apply_rotary_pos_emb_thd, {"t", "cu_seqlens", "freqs", "cp_group", *how})
    return _apply_rotary_pos_emb_thd


def _get_cached_cos_sin(original: Function) -> Function:
    """The table of fused MLA: under context parallelism, a slice of a longer one is not the slice of a shorter one."""
    length_of = argument(original, "seq_len")
    packed_of = argument(original, "packed_seq") if "packed_seq" in inspect.signature(original).parameters else None

    @functools.wraps(original)
    def get_cached_cos_sin(*args: Any, **kwargs: Any) -> Any:
        self, group = args[0], args[0].cp_group
        sliced = group is not None and group.size() > 1 and not (packed_of and packed_of(args, kwargs))
        if sliced and length_of(args, kwargs) != self.max_seq_len_cached:
            self.max_seq_len_cached = -1  # shorter than any: upstream makes the table anew
        return original(*args, **kwargs)

    return get_cached_cos_sin


def _bindings(unpacked: set[str], packed: set[str], row_per_token: bool | None = True) -> dict[str, Any]:
    told = {"unpacked": frozenset(unpacked), "packed": frozenset(packed)}
    return {
        ROPE + "apply_rotary_pos_emb": functools.partial(_apply_rotary_pos_emb, **told),
        ROPE + "_apply_rotary_pos_emb_thd": functools.partial(_apply_rotary_pos_emb_thd, row_per_token=row_per_token),
    }


FUSED_MLA = {YARN + "get_cached_cos_sin": _get_cached_cos_sin}

BINDINGS: dict[str, dict[str, Callable[[Function], Function]]] = {
    "plain": _bindings({INTERLEAVED, MSCALE, MLA}, {INTERLEAVED, MSCALE, MLA, PER_TOKEN}, None),  # 0.12.0
    "interleaved": _bindings({MSCALE, MLA}, {INTERLEAVED, MSCALE, MLA, PER_TOKEN}, None),  # 0.12.1 to 0.12.3
    "mla": {**_bindings({MSCALE, MLA}, {INTERLEAVED, MSCALE, MLA, PER_TOKEN}, None), **FUSED_MLA},  # 0.13, 0.14
    "table": {**_bindings({MSCALE, MLA}, {INTERLEAVED, MSCALE, MLA, PER_TOKEN}), **FUSED_MLA},  # 0.15
    "mscale": {**_bindings({MLA}, {INTERLEAVED, MSCALE, MLA, PER_TOKEN}), **FUSED_MLA},  # 0.16
    "packed": {**_bindings({MLA}, {MSCALE, MLA, PER_TOKEN}), **FUSED_MLA},  # 0.17, 0.18
    "flag": {**_bindings(set(), {MSCALE, MLA, PER_TOKEN}), **FUSED_MLA},  # 0.19
}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """The factories of a variant: target -> function from upstream's object to the one that takes its place."""
    return BINDINGS[variant]
