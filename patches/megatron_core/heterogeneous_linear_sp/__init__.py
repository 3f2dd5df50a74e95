"""Linear layers in the place of attention or of an MLP, under sequence parallelism.

What is wrong (0.12 to 0.20): a layer of a heterogeneous model may have one linear layer for its attention or its MLP
(`replace_with_linear`). Its columns are cut over tensor-parallel ranks, and its output is put together. Under sequence
parallelism each rank shall get all columns of its own tokens. The rank's columns are put among zeros for that, to be
summed and scattered, but the zeros are added along the tokens, the first dimension, where columns are the last. The
output has another shape than the residual: "The size of tensor a (32) must match the size of tensor b (16)".

The patch lets upstream's function gather the columns, as it does without sequence parallelism, and keeps the rank's
tokens of them. Without sequence parallelism nothing changes.

Upstream: open.

Delete when: megatron-core adds zeros along the last dimension, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing
from shim.patches._views import view_with

GATHER = "megatron.core.transformer.heterogeneous.linear_replacements:_gather_from_tensor_parallel_region"
MAPPINGS = "megatron.core.tensor_parallel.mappings"


def _gather(original: Function) -> Function:
    config_of, with_config = argument(original, "config"), replacing(original, "config")

    @functools.wraps(original)
    def _gather_from_tensor_parallel_region(*args: Any, **kwargs: Any) -> Any:
        config = config_of(args, kwargs)
        if not config.sequence_parallel:
            return original(*args, **kwargs)
        args, kwargs = with_config(args, kwargs, view_with(config, sequence_parallel=False))
        return sys.modules[MAPPINGS].scatter_to_sequence_parallel_region(original(*args, **kwargs))

    return _gather_from_tensor_parallel_region


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {GATHER: _gather}
