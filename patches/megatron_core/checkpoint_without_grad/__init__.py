"""Checkpoints whose recomputed outputs do not all require a gradient.

What is wrong (0.12 to 0.20): the outputs of a checkpoint require a gradient as soon as one input does, even if
the function inside does not use that input. If the recomputed outputs require none, backward raises.
- tensor_parallel.checkpoint raises a ValueError if none of them does: a frozen layer detaches its output, say, and is a
  separate chunk.
- CheckpointWithoutOutput raises a RuntimeError if one of them does not. The up-projection of multi-latent attention
  (recompute_modules=["mla_up_proj"]) makes query, key and value. In front of frozen embeddings, with adapters at the
  query alone, key and value of the first layer require no gradient.

The patch: outputs that require no gradient take none in backward. Their share is zero, as it is without recompute. If
no output is left, a leaf takes the gradient and hands none on, so upstream's own backward ends as ever, and the inputs
get no gradient. If upstream's communication lies in between, weights in front may get zeros instead of none.
Backward of all other checkpoints runs as upstream has it.

Upstream: open.

Not covered: checkpoints of which no input requires a gradient. See frozen-recompute. A trainer that replaces
CheckpointFunction.backward needs the same change in its function.

Delete when: both functions leave out outputs that require no gradient, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shim.patches._arguments import Function
from shim.patches._recomputed import Recomputed

RANDOM = "megatron.core.tensor_parallel.random:"
CHECKPOINT = RANDOM + "CheckpointFunction.backward"
WITHOUT_OUTPUT = RANDOM + "CheckpointWithoutOutputFunction.backward"


def _checkpoint_function_backward(original: Function) -> Function:
    @functools.wraps(original)
    def backward(ctx: Any, *grads: Any) -> Any:
        run = ctx.run_function

        def with_one_to_take_it(*inputs: Any) -> Any:
            outputs = run(*inputs)
            found = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
            return outputs if any(map(_requires_grad, found)) else _with_leaf(found)

        ctx.run_function = Recomputed(run, with_one_to_take_it)
        try:
            return original(ctx, *grads)
        finally:
            ctx.run_function = run

    return backward


def _checkpoint_without_output_function_backward(original: Function) -> Function:
    @functools.wraps(original)
    def backward(ctx: Any, *grads: Any) -> Any:
        outputs = getattr(ctx, "outputs", None)
        if outputs is None or all(map(_requires_grad, outputs)):
            return original(ctx, *grads)
        if not any(map(_requires_grad, outputs)):
            outputs = _with_leaf(outputs)
        pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if _requires_grad(output)]
        ctx.outputs = tuple(output for output, _ in pairs)
        return original(ctx, *(grad for _, grad in pairs))

    return backward


def _requires_grad(output: Any) -> bool:
    return isinstance(output, torch.Tensor) and output.requires_grad


def _with_leaf(outputs: Sequence[Any]) -> tuple[Any, ...]:
    """The outputs, the first that can require a gradient as a leaf. There is one, or backward would not run."""
    found = list(outputs)
    for place, output in enumerate(found):
        if isinstance(output, torch.Tensor) and (output.is_floating_point() or output.is_complex()):
            found[place] = output.detach().requires_grad_()
            break
    return tuple(found)


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {
        CHECKPOINT: _checkpoint_function_backward,
        WITHOUT_OUTPUT: _checkpoint_without_output_function_backward,
    }
