"""Multi-token prediction without Transformer Engine.

What is wrong (0.20): MultiTokenPredictionLayer asks whether its linear layers are those for inference. Without
Transformer Engine these layers are mocks and no classes, so isinstance() raises a TypeError and no model with
multi-token prediction can be built.

The patch answers no if the layers are no classes. With Transformer Engine upstream's own function answers.

Upstream: since pull request 5748; open.

Delete when: megatron-core asks isinstance() about classes only, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function

MODULE = "megatron.core.tensor_parallel.inference_layers"
# Upstream asks about this layer and a second one. Both are mocks or both are classes.
LAYER = "InferenceColumnParallelLinear"


def _is_inference_column_parallel_linear(original: Function) -> Function:
    upstream = vars(sys.modules[MODULE])

    @functools.wraps(original)
    def is_inference_column_parallel_linear(*args: Any, **kwargs: Any) -> bool:
        return isinstance(upstream[LAYER], type) and original(*args, **kwargs)

    return is_inference_column_parallel_linear


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {f"{MODULE}:is_inference_column_parallel_linear": _is_inference_column_parallel_linear}
