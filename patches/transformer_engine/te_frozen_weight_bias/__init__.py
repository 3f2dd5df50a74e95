"""A trained bias beside a frozen weight gets its gradient in Transformer Engine's linear layers.

What is wrong (2.1 to 2.20): in high precision Linear, LayerNormLinear, GroupedLinear and the second layer of
LayerNormMLP compute the gradient of a bias in the product that gives the gradient of the weight. A frozen weight has no
such product. So a bias that is trained beside it has no gradient, in silence, and never moves: with bias-only tuning
(BitFit), with LoRA that trains biases (bias="all", "lora_only"), with Qwen2's QKV biases and the biases of experts.
Under FP8 the quantization of the output's gradient gives that of the bias, which is right.

The patch: the backward of the four also returns the sum of the output's gradient over the rows, if the bias requires a
gradient, its weight none, and upstream's function returned none. Under delay_wgrad_compute too: nothing is delayed
beside a frozen weight. Without a bias, with a frozen one, or beside a trained weight nothing is computed.

Not covered: the operator of its own that Linear is in torch.compile from 2.20 on. Weights of a GroupedLinear that are
trained beside a frozen first one are te-frozen-experts's; here their biases alone get their gradients.

Upstream: open, not reported.

Delete when: the four return the gradient of a bias beside a frozen weight, and the releases before are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shim.patches._arguments import Function

MODULES = "transformer_engine.pytorch.module."
LINEAR = MODULES + "linear:_Linear.backward"
LAYERNORM_LINEAR = MODULES + "layernorm_linear:_LayerNormLinear.backward"
LAYERNORM_MLP = MODULES + "layernorm_mlp:_LayerNormMLP.backward"
GROUPED_LINEAR = MODULES + "grouped_linear:_GroupedLinear.backward"

# The places of weight and bias among the inputs of the functions.
PLACES = {
    "v2_1": {LINEAR: (0, 2), LAYERNORM_LINEAR: (3, 4), LAYERNORM_MLP: (6, 7)},
    "v2_2": {LINEAR: (0, 2), LAYERNORM_LINEAR: (3, 4), LAYERNORM_MLP: (5, 6)},
    "v2_15": {LINEAR: (0, 3), LAYERNORM_LINEAR: (3, 5), LAYERNORM_MLP: (6, 8)},  # with workspaces for quantized weights
    "v2_16": {LINEAR: (0, 2), LAYERNORM_LINEAR: (3, 5), LAYERNORM_MLP: (6, 8)},
}


def _rows(grad_output: Tensor) -> Tensor:
    return grad_output.reshape(-1, grad_output.shape[-1])


def _of_linear(original: Function, weight: int, bias: int) -> Function:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        grads = original(*args, **kwargs)
        ctx, grad_output = args[:2]
        needs = ctx.needs_input_grad
        if needs[weight] or not needs[bias] or grads[bias] is not None:
            return grads
        return (*grads[:bias], _rows(grad_output).sum(0), *grads[bias + 1 :])

    return backward


def _of_grouped_linear(original: Function) -> Function:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        grads = original(*args, **kwargs)
        ctx, grad_output = args[:2]
        first = len(grads) - ctx.num_gemms  # of the biases, which are the last inputs
        needs = ctx.needs_input_grad[first:]
        if ctx.weights_requires_grad or not any(need and grad is None for need, grad in zip(needs, grads[first:])):
            return grads
        parts = _rows(grad_output).split(list(ctx.m_splits))
        of_biases = [
            part.sum(0) if need and grad is None else grad for part, need, grad in zip(parts, needs, grads[first:])
        ]
        return (*grads[:first], *of_biases)

    return backward


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    found: dict[str, Callable[[Function], Function]] = {GROUPED_LINEAR: _of_grouped_linear}
    for target, (weight, bias) in PLACES[variant].items():
        found[target] = functools.partial(_of_linear, weight=weight, bias=bias)
    return found
