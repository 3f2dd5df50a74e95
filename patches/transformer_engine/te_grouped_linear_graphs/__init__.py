"""CUDA graphs of FP8 experts quantize new weights, and add the gradients of all microbatches.

What is wrong (2.10 to 2.16.1): while a CUDA graph is captured under FP8, GroupedLinear passes None for the flag that
says whether weights are quantized again. Linear, LayerNormLinear and LayerNormMLP pass the tensor that replays read,
and capture for all microbatches by is_first_microbatch=False. GroupedLinear captures for the microbatch of its call:
1. With is_first_microbatch=False, as in the local graphs of megatron-core, which are captured at the end of a step, no
   replay quantizes a weight. All of them use the FP8 weights from before the capture.
2. With is_first_microbatch=True, as in graphs of make_graphed_callables, each replay writes the gradient of a weight
   over main_grad, so that only the last microbatch counts. It also quantizes the weights once more for each microbatch.

The patch: during such a capture GroupedLinear.forward gets False for a given is_first_microbatch, and each weight is
quantized under the flag. With is_first_microbatch=None nothing changes: every replay quantizes and adds, on stock as
well. Outside of captures nothing changes.

Upstream: fixed in 2.17 by pull requests 3052 and 3065. Up to 2.9 the flag is passed.

Delete when: Transformer Engine 2.16 is not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing

PACKAGE = "transformer_engine.pytorch."
FORWARD = PACKAGE + "module.grouped_linear:GroupedLinear.forward"
# Where a weight is quantized
WORKSPACE = PACKAGE + "module.base:TransformerEngineBaseModule.get_weight_workspace"
QUANTIZE_WEIGHT = PACKAGE + "module.base:quantize_weight"  # from 2.15


def _flag() -> Any:
    """The tensor that replays of the graph that is being captured will read, or None."""
    manager = sys.modules[PACKAGE + "quantization"].FP8GlobalStateManager
    flag = getattr(manager, "quantization_state", manager).skip_fp8_weight_update_tensor  # its place from 2.15
    return flag if flag is not None and manager.fp8_graph_capturing() else None


def _forward(original: Function) -> Function:
    first_of, with_first = argument(original, "is_first_microbatch"), replacing(original, "is_first_microbatch")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if first_of(args, kwargs) and _flag() is not None:
            args, kwargs = with_first(args, kwargs, False)
        return original(*args, **kwargs)

    return forward


def _under_the_flag(original: Function) -> Function:
    flag_of, with_flag = argument(original, "skip_update_flag"), replacing(original, "skip_update_flag")

    @functools.wraps(original)
    def quantized(*args: Any, **kwargs: Any) -> Any:
        if flag_of(args, kwargs) is None:
            args, kwargs = with_flag(args, kwargs, _flag())
        return original(*args, **kwargs)

    return quantized


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {FORWARD: _forward, (WORKSPACE if variant == "v2_10" else QUANTIZE_WEIGHT): _under_the_flag}
