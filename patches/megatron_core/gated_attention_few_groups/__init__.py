"""Gated attention with fewer query groups than tensor-parallel ranks.

What is wrong (0.16): with `attention_output_gate` and `num_query_groups` below the tensor-parallel size, several
ranks share a query group. SelfAttention takes the rank's own heads of the group from the query, and leaves the gate
that of the whole group. The gate does not fit the output of attention, and the first forward pass raises a
RuntimeError.

The patch takes the same heads from the gate. It is a view, and its gradient is zero for the heads of other ranks, as
that of the query. The gather in front of both sums over ranks. Nothing happens if the gate has as many heads as
the query.

Upstream: fixed in 0.17 by pull request 3575.

Delete when: megatron-core 0.16 is not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function

TARGET = "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors"


def _get_query_key_value_tensors(original: Function) -> Function:
    @functools.wraps(original)
    def get_query_key_value_tensors(*args: Any, **kwargs: Any) -> Any:
        tensors = original(*args, **kwargs)
        if len(tensors) != 4:  # no gate
            return tensors
        query, key, value, gate = tensors  # [s, b, heads, head size]
        heads = query.shape[2]
        if gate.shape[2] == heads:
            return tensors
        # The rank that upstream takes the query's heads for.
        rank = sys.modules["megatron.core.parallel_state"].get_tensor_model_parallel_rank()
        first = rank % (gate.shape[2] // heads) * heads
        return query, key, value, gate[:, :, first : first + heads]

    return get_query_key_value_tensors


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {TARGET: _get_query_key_value_tensors}
