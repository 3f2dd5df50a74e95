"""Full activation recompute of layers with adapters behind frozen embeddings.

What is wrong (0.12 to 0.19): with the base weights frozen, as LoRA has it, the embeddings require no gradient. The
output of a checkpoint requires one only where an input does, so with recompute_granularity="full" no layer of the
decoder gets one: adapters in the decoder are silently not trained, and where all of them are there, backward raises.

The patch lets the first hidden states [s, b, h] that a block recomputes from require a gradient, where none is required
yet and the block has weights to train. Trainers that make their embeddings require a gradient by a hook see no change.

Upstream: open. Delete when TransformerBlock does so itself.

Not covered: single modules that are recomputed (recompute_granularity="selective") in front of the first adapter. With
tensor_parallel.checkpoint adapters inside of them are not trained; with CheckpointWithoutOutput
(recompute_modules=["layernorm"] and others that drop their output) backward raises a TypeError, as in stock, because
nothing was saved for the recompute. The remedy for both: let the embeddings require a gradient, by a hook on their
output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function, argument, replacing

BLOCK = "megatron.core.transformer.transformer_block:TransformerBlock._checkpointed_forward"
FUNCTION = "megatron.core.recompute:checkpointed_forward"


def _checkpointed_forward(original: Function) -> Function:
    states_of, put_states = argument(original, "hidden_states"), replacing(original, "hidden_states")

    @functools.wraps(original)
    def checkpointed_forward(*args: Any, **kwargs: Any) -> Any:
        block, states = args[0], states_of(args, kwargs)
        if torch.is_grad_enabled() and not states.requires_grad and _trains(block):
            args, kwargs = put_states(args, kwargs, states.detach().requires_grad_())
        return original(*args, **kwargs)

    return checkpointed_forward


def _trains(block: Any) -> bool:
    return any(weight.requires_grad for weight in block.layers.parameters())


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """The factories of a variant: target -> function from upstream's object to the one that takes its place."""
    return {{"method": BLOCK, "function": FUNCTION}[variant]: _checkpointed_forward}
