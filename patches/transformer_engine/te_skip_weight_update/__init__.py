"""FP8GlobalStateManager.set_skip_fp8_weight_update_tensor for TE releases that lack it.

What is wrong (2.15 to 2.16.1): the state moved to FP8GlobalStateManager.quantization_state without the method that sets
the flag. megatron-core calls the method when it captures and replays CUDA graphs under FP8, which raises an
AttributeError.

The patch adds the method. The flag is a CUDA tensor [1] in fp32. The method makes the tensor once and writes in place,
because captured graphs hold the tensor.

Upstream: back with 2.17.

Delete when: Transformer Engine 2.16 is not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

METHOD = "transformer_engine.pytorch.quantization:FP8GlobalStateManager.set_skip_fp8_weight_update_tensor"


def _set_skip(missing: Any) -> Any:
    def set_skip_fp8_weight_update_tensor(cls: Any, skip: bool) -> None:
        state = cls.quantization_state
        if state.skip_fp8_weight_update_tensor is None:
            state.skip_fp8_weight_update_tensor = torch.empty(1, dtype=torch.float32, device="cuda")
        state.skip_fp8_weight_update_tensor.fill_(skip)

    return classmethod(set_skip_fp8_weight_update_tensor)


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Any], Any]]:
    """Target -> factory for a variant. A factory takes upstream's object, here none, and returns the added one."""
    return {METHOD: _set_skip}
