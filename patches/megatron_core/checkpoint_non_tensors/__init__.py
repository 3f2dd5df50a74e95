"""Activation recompute of layers that get a tuple, such as two rotary tables.

What is wrong (0.12 to 0.20): tensor_parallel.checkpoint saves each argument for backward, and torch saves tensors and
None only. Models with local and global attention, such as Gemma 3 and 4, have two rotary tables, which they hand to
their layers as a tuple. With recompute_granularity="full" the first step raises a TypeError: "save_for_backward can
only save variables". Up to 0.18 the decoder does, and layers of multi-token prediction in all releases. Absorbed
multi-latent attention hands it the packed row (0.17 and 0.18), and layers of experts hand it tensors that they have
computed before.

The patch hands the checkpoint the tensors in a tuple or list one by one, also those in a tuple inside, so they are
saved and get their gradients like any other argument. The recomputed function puts them together again. It holds
anything else that is no tensor. A call that has tensors and None only goes to upstream as it is.

Upstream: 0.19 hands over the two tables one by one in the decoder (Megatron-LM pull request 5324). Open for the other
callers. Transformer Engine's te_checkpoint, which has the layers under FP8 and FP4, takes any argument.

Not covered: CheckpointWithoutOutput, to which upstream hands tensors only. Tensors inside an object that is neither a
tuple nor a list, such as a packed row, are not recomputed from: no gradient is expected to reach them.

Delete when: tensor_parallel.checkpoint, or each of its callers, saves tensors only, and the releases before that are
not supported.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shim.patches._arguments import Function
from shim.patches._recomputed import Recomputed

CHECKPOINT = "megatron.core.tensor_parallel.random:checkpoint"


def _checkpoint(original: Function) -> Function:
    @functools.wraps(original)
    def checkpoint(function: Function, distribute_saved_activations: bool, *args: Any) -> Any:
        if all(argument is None or isinstance(argument, torch.Tensor) for argument in args):
            return original(function, distribute_saved_activations, *args)
        saved: list[torch.Tensor | None] = []
        together = [_apart(argument, saved) for argument in args]

        def run(*inputs: Any) -> Any:
            return function(*(make(inputs) for make in together))

        return original(Recomputed(function, run), distribute_saved_activations, *saved)

    return checkpoint


def _apart(argument: Any, saved: list[torch.Tensor | None]) -> Callable[[Sequence[Any]], Any]:
    """Adds to `saved` what a checkpoint can save of the argument. Returns what makes the argument of all that is saved.

    An argument that cannot be saved has a None in its place: the first of all is the one that may be distributed.
    """
    if isinstance(argument, torch.Tensor):
        saved.append(argument)
        return operator.itemgetter(len(saved) - 1)
    if type(argument) in (tuple, list):
        kind, parts = type(argument), [_apart(part, saved) for part in argument]
        return lambda inputs: kind(make(inputs) for make in parts)
    saved.append(None)
    return lambda inputs: argument


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {CHECKPOINT: _checkpoint}
