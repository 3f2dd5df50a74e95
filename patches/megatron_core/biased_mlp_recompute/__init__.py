"""Recompute of a module that returns its bias.

What is wrong (0.12 to 0.20): with add_bias_linear=True an MLP returns the bias of its second layer beside its output,
and its caller adds the two up. With recompute_modules=["mlp"] a checkpoint runs the MLP, and autograd makes all that a
checkpoint returns results of it: the bias is no leaf any more. So its gradient leads to the checkpoint, whose recompute
returns the bias again, and backward calls itself until there are no threads or no memory left. A frozen bias requires
a gradient from then on. GPT-OSS, vision towers and models before Llama have such biases. What has the defect:
- the MLP of a TransformerLayer, in a language model and in a vision tower, also with adapters (0.12 to 0.20),
- the same under FP8 and FP4, where Transformer Engine's checkpoint runs it (0.13 to 0.20),
- a gated delta net with recompute_modules=["gdn"], on the dev branch,
- a function of a trainer that returns a parameter.

The patch lets these two checkpoints return an alias of a parameter: the same values in the same storage, in another
tensor. The parameter stays a leaf, and gets its gradient from the recompute, as the weights of the MLP do. Other
outputs stay as they are.

Upstream: open.

Delete when: a checkpoint of megatron-core returns no parameter, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function

FORWARD = "megatron.core.tensor_parallel.random:CheckpointFunction.forward"
TE_CHECKPOINT = "megatron.core.extensions.transformer_engine:te_checkpoint"


def _without_parameters(outputs: Any) -> Any:
    """The outputs of what is recomputed, with an alias in the place of each parameter."""
    if isinstance(outputs, tuple):
        if any(isinstance(output, torch.nn.Parameter) for output in outputs):
            return tuple(_without_parameters(output) for output in outputs)
    elif isinstance(outputs, torch.nn.Parameter):
        return outputs.detach()
    return outputs


def _forward(original: Function) -> Function:
    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return _without_parameters(original(*args, **kwargs))

    return forward


def _te_checkpoint(original: Function) -> Function:
    @functools.wraps(original)
    def te_checkpoint(forward_func: Function, *args: Any, **kwargs: Any) -> Any:
        # Of what megatron-core recomputes this way, modules alone return a parameter.
        if not isinstance(forward_func, torch.nn.Module):
            return original(forward_func, *args, **kwargs)

        def run(*inputs: Any, **named: Any) -> Any:
            outputs = forward_func(*inputs, **named)
            return outputs if torch.is_grad_enabled() else _without_parameters(outputs)

        return original(run, *args, **kwargs)

    return te_checkpoint


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {FORWARD: _forward} if variant == "v0_12" else {FORWARD: _forward, TE_CHECKPOINT: _te_checkpoint}
