"""A trained bias beside a frozen weight gets its gradient.

What is wrong (0.12 to 0.20): ColumnParallelLinear computes with LinearWithFrozenWeight if its weight requires no
gradient. The backward of that function returns None for the bias, too. So a bias that is trained beside a frozen weight
has no gradient, in silence, and never moves: with bias-only tuning (BitFit), with LoRA that trains biases
(bias="all", "lora_only"), with Qwen2's QKV biases, the in_proj of Mamba, BERT's output layer. Under DDP with
overlap_grad_reduce an assertion fails instead.

The patch: the backward also returns the sum of the output's gradient over all tokens, if the bias requires a gradient
and upstream's function returned none for it. That is the gradient that the bias has beside a trained weight. Without a
bias, or with a frozen one, nothing is computed.

Upstream: open, not reported.

Delete when: LinearWithFrozenWeight returns the gradient of the bias, and the releases before are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shim.patches._arguments import Function

BACKWARD = "megatron.core.tensor_parallel.layers:LinearWithFrozenWeight.backward"
BIAS = 2  # the place among the inputs of the function: input, weight, bias


def _backward(original: Function) -> Function:
    @functools.wraps(original)
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        grads = original(ctx, grad_output)
        if not ctx.needs_input_grad[BIAS] or grads[BIAS] is not None:
            return grads
        of_bias = grad_output.sum(dim=tuple(range(grad_output.dim() - 1)))  # also in rows: copies no strided tensor
        return (*grads[:BIAS], of_bias, *grads[BIAS + 1 :])

    return backward


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {BACKWARD: _backward}
