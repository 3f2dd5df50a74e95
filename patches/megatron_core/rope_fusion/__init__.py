"""Fused rotary embeddings that ignore some arguments.

What is wrong: with apply_rope_fusion, these arguments never reach the fused kernel:

| | unpacked [s, b, h, d] | packed (THD) [t, h, d] |
|---|---|---|
| rotary_interleaved | 0.12.0 | 0.12 to 0.16 |
| mscale (YaRN) | 0.12 to 0.15 | 0.12 to 0.19 |
| interleaving of MLA (config.multi_latent_attention; an argument from 0.19 on) | 0.12 to 0.18 | 0.12 to 0.19 |
| a table with one row per packed token, with or without context parallelism | - | 0.12 to 0.20 |

In the last case (multimodal embeddings) the table has as many rows as the packed row has tokens. The kernel counts
positions from the start of each sequence. From 0.15 on the unfused function takes the token's own row instead. Up to
0.14 the unfused function also counts, and only the first sequence is right. 0.20 is told the length of the longest
sequence, and takes a table without more rows than that for one of positions. The patch does the same.

The patch makes such a call unfused: upstream's own function gets a shallow copy of the config with fusion off. The
original config is never written. If the fused function is missing, upstream's error stays.

Up to 0.14 the patch also tells the two kinds of table apart for unfused packed rows: a token takes its own row if every
sequence begins with the row that the first sequence begins with. A table of positions differs there. Such rows are
rotated as in rope-thd, because a loop over sequences would need a host read to tell.

Not covered:
- fused_single_qkv_rope (0.15 to 0.20), another kernel: fused-qkv-rope puts it off where it ignores an argument.
- Other reads of config.apply_rope_fusion in multi_latent_attention and absorbed_mla. Their kernels interleave, find the
  factor of YaRN in the table, and get the offsets and, from 0.14 on, the ranks. In 0.13 packed rows of MLA under
  context parallelism need to be unfused (mla-packed-rope). DSA forbids fusion; DSA and dynamic_context call
  apply_rotary_pos_emb.
- Automodel issue 1439 (a wrong loss, fused, with context parallelism). Automodel calls Transformer Engine itself, and
  the cause is open. With megatron-core's arguments (unpacked: the rank's slice of the table; packed: the whole table,
  size and rank) the positions equal those of the unfused function.

Upstream: Megatron-LM pull request 5243 (one row per token under context parallelism, unfused).

Delete when: fused rotary embeddings refuse what they cannot do upstream, and the releases before that are not
supported.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function, argument, replacing
from shim.patches.megatron_core._packed_rotation import ROPE, rotate_as_one
from shim.patches.megatron_core._rotation_tries import APPLY, THD, Rotation, configs_of, is_cut, plain_config

INTERLEAVED, MSCALE, MLA, PER_TOKEN = "rotary_interleaved", "mscale", "interleaving of MLA", "a row per token"
ASKED = ("", "row per token", "interleaved", "mla", "mscale")  # what a probe asks for


def _apply_rotary_pos_emb(original: Function, unpacked: frozenset[str], packed: frozenset[str]) -> Function:
    """`unpacked` and `packed`: the arguments that never reach the fused function of each format in this release."""
    get = {name: argument(original, name) for name in ("t", "freqs", "config", "cu_seqlens", "mscale")}
    put_config = replacing(original, "config")
    upstream = vars(sys.modules[ROPE[:-1]])
    cp_size_of, mla_of = _cp_size(original, upstream), _mla(original)
    takes_longest = "max_seqlen" in inspect.signature(original).parameters  # from 0.20
    longest_of = argument(original, "max_seqlen") if takes_longest else lambda args, kwargs: None

    def wants_the_untold(args: tuple[Any, ...], kwargs: dict[str, Any], config: Any) -> bool:
        cu_seqlens = get["cu_seqlens"](args, kwargs)
        if cu_seqlens is None:
            untold, fused = unpacked, upstream["fused_apply_rotary_pos_emb"]
        else:
            untold, fused = packed, upstream["fused_apply_rotary_pos_emb_thd"]
        if fused is None:
            return False  # upstream raises an error itself
        if INTERLEAVED in untold and config.rotary_interleaved:
            return True
        if MSCALE in untold and get["mscale"](args, kwargs) != 1.0:
            return True
        if MLA in untold and mla_of(args, kwargs):
            return True
        # A single sequence has the same rows either way. The packed row is cut over all context-parallel ranks.
        if PER_TOKEN not in untold or cu_seqlens is None or cu_seqlens.numel() <= 2:
            return False
        rows, longest = get["freqs"](args, kwargs).size(0), longest_of(args, kwargs)
        if longest is not None and rows <= longest:
            return False
        return bool(rows == get["t"](args, kwargs).size(0) * cp_size_of(args, kwargs))

    @functools.wraps(original)
    def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
        config = get["config"](args, kwargs)
        if config.apply_rope_fusion and wants_the_untold(args, kwargs, config):
            args, kwargs = put_config(args, kwargs, _unfused_config(config))
        return original(*args, **kwargs)

    return apply_rotary_pos_emb


def _unfused_config(config: Any) -> Any:
    """The shared `config` with fusion off: a shallow copy, or a view of it for a trace.

    torch.compile traces no copy before torch 2.12.
    """
    if torch.compiler.is_compiling():
        return _Unfused(config)
    config = copy.copy(config)
    config.apply_rope_fusion = False
    return config


class _Unfused:
    """Reads all but one field from the config that it was made from."""

    apply_rope_fusion = False

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _mla(original: Function) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """A getter for the MLA interleaving of a call: an argument from 0.19 on, before that the config."""
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


def _unfused(unpacked: set[str], packed: set[str]) -> Callable[[Function], Function]:
    return functools.partial(_apply_rotary_pos_emb, unpacked=frozenset(unpacked), packed=frozenset(packed))


ROW_OF_TOKEN = {THD: functools.partial(rotate_as_one, row_per_token=None)}  # a table whose values show it

BINDINGS: dict[str, dict[str, Callable[[Function], Function]]] = {
    "v0_12": {APPLY: _unfused({INTERLEAVED, MSCALE, MLA}, {INTERLEAVED, MSCALE, MLA, PER_TOKEN}), **ROW_OF_TOKEN},
    "v0_12_1": {APPLY: _unfused({MSCALE, MLA}, {INTERLEAVED, MSCALE, MLA, PER_TOKEN}), **ROW_OF_TOKEN},
    "v0_15": {APPLY: _unfused({MSCALE, MLA}, {INTERLEAVED, MSCALE, MLA, PER_TOKEN})},
    "v0_16": {APPLY: _unfused({MLA}, {INTERLEAVED, MSCALE, MLA, PER_TOKEN})},
    "v0_17": {APPLY: _unfused({MLA}, {MSCALE, MLA, PER_TOKEN})},
    "v0_19": {APPLY: _unfused(set(), {MSCALE, MLA, PER_TOKEN})},
    "v0_20": {APPLY: _unfused(set(), {PER_TOKEN})},
}


def _asked_by(config: Any) -> Iterator[str]:
    """What attention asks of a rotation with such a config. Its table may have a row for each token in any case."""
    yield from ("", "row per token")
    if config.rotary_interleaved:
        yield "interleaved"
    if config.multi_latent_attention:
        yield "mla"
    if config.multi_latent_attention or getattr(config, "yarn_rotary_scaling_factor", None) is not None:
        yield "mscale"


def probe(function: Function, target: str, models: list[Any]) -> bool | str:
    """Does a fused call give what it is asked for? See docs/patch-modules.md.

    With a model it is asked for what the model asks, else for all.
    """
    configs = configs_of(models)
    if configs and not any(config.apply_rope_fusion for config in configs):
        return True
    if is_cut(target):
        return "shim cannot rotate a whole row on a rank that has a part of it"
    asked = dict.fromkeys(ask for config in configs for ask in _asked_by(config)) if configs else ASKED
    device, failed = "cuda" if torch.cuda.is_available() else "cpu", ""
    for ask in asked:
        for packed in (True,) if ask == "row per token" else (False, True):
            rotation = Rotation(ask, packed, device=device)
            try:
                made = rotation.call(function, target, (configs or [plain_config()])[0], fused=True)
            except Exception as error:  # noqa: BLE001 - another call may show that the function is wrong
                failed = failed or f"a call raised {type(error).__name__}: {error}"
                continue
            if not rotation.is_right(made):
                return False
    return failed or True


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return BINDINGS[variant]
