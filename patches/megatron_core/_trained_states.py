"""Hidden states that require a gradient in front of what is recomputed, behind weights that are frozen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from shim.patches._arguments import Function, argument, replacing


def from_trained_states(original: Function, recomputes: Callable[[Any], bool]) -> Function:
    """A wrapper of a block's function of its hidden states [s, b, h]: it lets them require a gradient if none does yet.

    recomputes: whether the block needs that in front of its first layer. It is asked only while gradients are on. A
        block without trained weights is left alone.
    """
    states_of, put_states = argument(original, "hidden_states"), replacing(original, "hidden_states")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        block, states = args[0], states_of(args, kwargs)
        # No tensor: inference wraps the states, and later pipeline stages get none here.
        begins = isinstance(states, torch.Tensor) and not states.requires_grad and torch.is_grad_enabled()
        if begins and recomputes(block) and any_trained(block.layers):
            args, kwargs = put_states(args, kwargs, states.detach().requires_grad_())
        return original(*args, **kwargs)

    return forward


def any_trained(module: Any) -> bool:
    """Whether a weight of the module requires a gradient."""
    return any(weight.requires_grad for weight in module.parameters())
