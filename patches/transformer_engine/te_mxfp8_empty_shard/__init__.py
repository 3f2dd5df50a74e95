"""MXFP8 weights are cast on ranks that own no shard of them.

What is wrong (2.11 to 2.19): with MXFP8 weights each data-parallel rank casts its shards of the main weights, and all
exchange the largest values. A rank that owns a shard of none of these weights takes part, but raises an
UnboundLocalError before the exchange: it has no shard whose dtype it could take. The other ranks then wait for it.
Under wide data parallelism the last ranks own the padding of a buffer, or weights that are not quantized.

The patch: such a rank casts a shard of no elements, at the beginning of its first weight and of its dtype, which main
weights have when they are cast. The compiled cast finds no element in it, and writes nothing. Where a rank owns a
shard nothing changes.

Upstream: fixed in 2.20 by pull request 3348.

Delete when: Transformer Engine 2.19 is not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing

CAST = "transformer_engine.pytorch.tensor.utils:_cast_master_weights_to_fp8_mxfp8_scaling"


def _cast_master_weights_to_fp8_mxfp8_scaling(original: Function) -> Function:
    params_of, with_params = argument(original, "params"), replacing(original, "params")

    @functools.wraps(original)
    def _cast_master_weights_to_fp8_mxfp8_scaling(*args: Any, **kwargs: Any) -> Any:
        params = params_of(args, kwargs)
        if all(main is None for _, main, _, _ in params):
            weight = params[0][0]
            data = weight._rowwise_data, weight._columnwise_data
            main = data[0].new_empty(0, dtype=weight.dtype)
            parts = tuple(each.new_empty(0) for each in data)  # of a weight that is itself cut
            args, kwargs = with_params(args, kwargs, [(weight, main, 0, parts), *params[1:]])
        return original(*args, **kwargs)

    return _cast_master_weights_to_fp8_mxfp8_scaling


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {CAST: _cast_master_weights_to_fp8_mxfp8_scaling}
