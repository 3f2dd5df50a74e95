"""Wrong rotary positions for fused MLA under context parallelism.

What is wrong (0.13 to 0.20): YarnRotaryEmbedding.get_cached_cos_sin caches the table of the longest row so far, already
cut for this rank, and returns its beginning for shorter rows. A shorter row is cut elsewhere, so every row that is
shorter than an earlier one gets positions of other ranks; and so does every row shorter than
original_max_position_embeddings, whose table is made with the module. Packed rows get the whole table, which is right.

In 0.20 RotaryEmbedding has the same method with the same defect. There a call may bring its own group, and a later call
with another group gets the table that is cut for the first.

The patch makes upstream's function compute a new table whenever the length differs from that of the cached table, and
before and after a call with another group than the module's own.

Upstream: open.

Delete when: the table is cut after it is taken from the cache, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument

EMBEDDINGS = "megatron.core.models.common.embeddings."
ROPE = EMBEDDINGS + "rotary_pos_embedding:RotaryEmbedding."
YARN = EMBEDDINGS + "yarn_rotary_pos_embedding:YarnRotaryEmbedding."


def _optional(original: Function, name: str) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any]:
    """As `argument`; None if the release has no such parameter."""
    return argument(original, name) if name in inspect.signature(original).parameters else lambda args, kwargs: None


def _get_cached_cos_sin(original: Function) -> Function:
    length_of = argument(original, "seq_len")
    packed_of, given_group_of = _optional(original, "packed_seq"), _optional(original, "cp_group")

    @functools.wraps(original)
    def get_cached_cos_sin(*args: Any, **kwargs: Any) -> Any:
        self, given = args[0], given_group_of(args, kwargs)
        if packed_of(args, kwargs):
            return original(*args, **kwargs)
        group = self.cp_group if given is None else given
        foreign = group is not self.cp_group
        # 0.20 has no table before the first call.
        other_length = length_of(args, kwargs) != getattr(self, "max_seq_len_cached", None)
        if foreign or (other_length and group is not None and group.size() > 1):
            self.max_seq_len_cached = -1  # shorter than any row: upstream computes a new table
        if not foreign:
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            self.max_seq_len_cached = -1

    return get_cached_cos_sin


def probe(module: Any, method: str, models: list[Any]) -> bool | str:
    """See docs/patch-modules.md."""
    if module.cp_group is None or module.cp_group.size() == 1:
        return True  # no table is cut
    return "shim does not try tables that are cut over ranks"


BINDINGS: dict[str, dict[str, Callable[[Function], Function]]] = {
    "v0_13": {YARN + "get_cached_cos_sin": _get_cached_cos_sin},
    "v0_20": {YARN + "get_cached_cos_sin": _get_cached_cos_sin, ROPE + "get_cached_cos_sin": _get_cached_cos_sin},
}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return BINDINGS[variant]
