"""Wrong rotary positions for fused MLA under context parallelism.

What is wrong (0.13 to 0.19): YarnRotaryEmbedding.get_cached_cos_sin caches the table of the longest row so far, already
cut for this rank, and returns its beginning for shorter rows. A shorter row is cut elsewhere, so every row that is
shorter than an earlier one gets positions of other ranks. Packed rows get the whole table, which is right.

The patch makes upstream's function compute a new table whenever the length differs from that of the cached table.

Upstream: open. Delete when every supported release cuts the table after it reads the cache.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument

YARN = "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding."


def _get_cached_cos_sin(original: Function) -> Function:
    length_of = argument(original, "seq_len")
    packed_of = argument(original, "packed_seq") if "packed_seq" in inspect.signature(original).parameters else None

    @functools.wraps(original)
    def get_cached_cos_sin(*args: Any, **kwargs: Any) -> Any:
        self, group = args[0], args[0].cp_group
        sliced = group is not None and group.size() > 1 and not (packed_of and packed_of(args, kwargs))
        if sliced and length_of(args, kwargs) != self.max_seq_len_cached:
            self.max_seq_len_cached = -1  # shorter than any row: upstream computes a new table
        return original(*args, **kwargs)

    return get_cached_cos_sin


def probe(module: Any, method: str, models: list[Any]) -> bool | str:
    """See docs/patch-modules.md."""
    if module.cp_group is None or module.cp_group.size() == 1:
        return True  # no table is cut
    return "shim does not try tables that are cut over ranks"


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {YARN + "get_cached_cos_sin": _get_cached_cos_sin}
