"""The gather of multi-token prediction under tensor parallelism.

What is wrong (0.12): the projection eh_proj of a layer of multi-token prediction leaves each tensor-parallel rank with
a part of the hidden size. The layer gathers the parts by all_gather_last_dim_from_tensor_parallel_region, whose
backward sums the gradients of all ranks. But every rank has the whole gradient already, also with sequence parallelism.
So all that flows back through eh_proj is TP times too large: the gradient of eh_proj, of its two norms, and what
multi-token prediction adds to the embedding and to the main model.

The patch lets the layer gather by gather_from_tensor_model_parallel_region, whose backward takes the rank's part. It
sends the same message in forward, and none in backward. The other user of the first gather, the legacy dispatcher of
experts, keeps it: there the gradients of the ranks are parts of a sum.

Upstream: fixed in 0.13, in the same way, by commit 06e9f28b30.

Delete when: 0.12 is not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, takes

TARGET = "megatron.core.transformer.multi_token_prediction:all_gather_last_dim_from_tensor_parallel_region"
MAPPINGS = "megatron.core.tensor_parallel.mappings"


def _gather(original: Function) -> Function:
    mappings = vars(sys.modules[MAPPINGS])
    input_of = argument(original, "input_", like=mappings["all_gather_last_dim_from_tensor_parallel_region"])

    @functools.wraps(original)
    def all_gather_last_dim_from_tensor_parallel_region(*args: Any, **kwargs: Any) -> Any:
        return sys.modules[MAPPINGS].gather_from_tensor_model_parallel_region(input_of(args, kwargs))

    takes(all_gather_last_dim_from_tensor_parallel_region, ["input_"])
    return all_gather_last_dim_from_tensor_parallel_region


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {TARGET: _gather}
