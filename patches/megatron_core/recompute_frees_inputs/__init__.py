"""Inputs of checkpoints that are let go after their backward, as an option.

What is wrong (0.12 to 0.20): tensor_parallel.checkpoint recomputes from detached inputs, and runs backward to them. If
a module keeps a tensor of the recomputed graph, the graph lives on, and with it these inputs and their gradients. The
token dispatchers of a mixture of experts keep the probabilities of their router until their layer runs again. So after
backward each recomputed chunk of layers holds its input and the gradient of it, [s, b, h] twice, beside what the next
step needs.

The patch does nothing until the option `release` is true. Then a checkpoint hands what it recomputes an alias of each
input that requires a gradient, and makes the detached input itself empty after its backward. Only the graph holds that
one. No storage is resized: the memory is freed if nothing else has it, and stays if something has it. That may be an
MTP layer with the same input, a norm that saved its output, a detached view, or a hook that keeps what a layer got.
Gradients are the same, bit for bit.

Upstream: open (Megatron-LM pull requests 3267 and, for the gradients alone, 6339). verl replaces
CheckpointFunction.backward by the function of 3267, which resizes storages, and so takes them from other users of them.
With its function in place the patch has no effect.

Not covered: te_checkpoint of Transformer Engine, CheckpointWithoutOutput, and all else that a kept graph holds.

Delete when: CheckpointFunction lets its detached inputs go, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.ops._checks import is_plain
from shim.patches._arguments import Function

BACKWARD = "megatron.core.tensor_parallel.random:CheckpointFunction.backward"


class _Alias(torch.autograd.Function):
    """The same values in the same storage, in another tensor. Hands its gradient on as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _backward(original: Function, release: bool) -> Function:
    @functools.wraps(original)
    def backward(ctx: Any, *grads: Any) -> Any:
        if not release:
            return original(ctx, *grads)
        run = ctx.run_function
        detached: list[torch.Tensor] = []

        def from_aliases(*inputs: Any) -> Any:
            detached.extend(tensor for tensor in inputs if _can_be_let_go(tensor))
            return run(*(_Alias.apply(tensor) if _can_be_let_go(tensor) else tensor for tensor in inputs))

        ctx.run_function = from_aliases
        try:
            return original(ctx, *grads)
        finally:
            ctx.run_function = run
            for tensor in detached:
                tensor.grad = None  # who gets the gradient has it
                tensor.data = tensor.data.new_empty(0)

    return backward


def _can_be_let_go(tensor: Any) -> bool:
    return is_plain(tensor) and tensor.requires_grad  # quantized ones cannot be made empty


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {BACKWARD: functools.partial(_backward, release=options["release"])}
