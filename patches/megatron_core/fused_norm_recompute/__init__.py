"""Recompute of norms that hand on the residual (fused_residual_rmsnorm).

What is wrong (0.17 to 0.20): with `fused_residual_rmsnorm` a norm returns the residual beside its output, and that is
its input: Transformer Engine forks a tensor without a copy. With "layernorm" among recompute_modules a layer throws
away what the norm has returned, to compute it anew in backward. So it frees the hidden states, while the residual
connection and the recompute are still to read them: a segmentation fault on a CPU, an access to freed memory on a GPU.
No check refuses the two options together.

What the patch does: an output that shares its memory with an input of the checkpoint is not thrown away. It would free
nothing that is not kept anyway. Other outputs are, as on stock. It costs a comparison of addresses for each checkpoint.

Upstream: not reported.

Delete when: megatron-core itself keeps such outputs or refuses the two options together, and the releases before that
are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shim.patches._arguments import Function

CHECKPOINT = "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.checkpoint"


def _checkpoint(original: Function) -> Function:
    @functools.wraps(original)
    def checkpoint(self: Any, run_function: Any, *args: Any) -> Any:
        found = original(self, run_function, *args)
        inputs = {_memory(given) for given in args if isinstance(given, Tensor)}
        if self.outputs is not None and any(_memory(output) in inputs for output in self.outputs):
            # Upstream frees these, and gives them what the recompute returns in the same place.
            self.outputs = tuple(
                output.new_empty(0) if _memory(output) in inputs else output for output in self.outputs
            )
        return found

    return checkpoint


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {CHECKPOINT: _checkpoint}
