"""FP8 and FP4 contexts under activation recompute.

What is wrong, since when (0.12 to 0.19 where nothing else is said):
- tensor_parallel.checkpoint restores the random states in a recompute, but not the FP8/FP4 autocast region: what ran
  in one is recomputed outside of it, in BF16 or with a crash.
- CheckpointWithoutOutput raises a NameError without Transformer Engine (0.13 and later); up to 0.15 its recompute
  fails where no forward pass was recorded; in 0.12 it does not restore the region either.
- TransformerBlock of 0.12 recomputes without the regions of its layers that all recipes but delayed scaling need, so
  that forward and recompute run unquantized.

The rule: a recompute runs in the region that was active around the forward pass (whether it quantizes or calibrates,
recipe, group), and with delayed scaling takes the scales of the forward pass, as the checkpoint of Transformer Engine
does. Nothing changes where no region was active. The region is kept in the recomputed function, so it is there also
when a trainer has replaced CheckpointFunction.backward.

With te-fp8-state the scales stay with the checkpoint, in whatever order and however often backward runs, also in a
checkpoint inside of another one. Without it tensor_parallel.checkpoint puts them back into Transformer Engine's queues
for each recompute (_fp8_queues); CheckpointWithoutOutput from 0.13 takes them first in, first out, as upstream has it.

Covered: tensor_parallel.checkpoint and all that calls it or CheckpointFunction (attention, MoE, MLP, TransformerBlock,
recompute.py); CheckpointWithoutOutput; TransformerBlock of 0.12. Not covered, because they are right: te_checkpoint
(on Transformer Engine 2.1 with te-fp8-state), and with it TransformerBlock and recompute.py under FP8 and FP4. Not
covered, because it is another's: torch.utils.checkpoint. CheckpointWithoutOutput keeps its bookkeeping (`fp8` is set
also where the argument is False, on purpose: amax of layer norms and activations depends on it), and from 0.13 restores
the recipe but not the group, as upstream has it.

Upstream: Megatron-LM issue 7538 (open). Delete a variant when its releases are no longer supported, and the patch when
CheckpointFunction restores the region upstream.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from shim.patches._arguments import Function
from shim.patches._autocast import active_autocast, remembering
from shim.patches._fp8_scales import ForwardScales

RANDOM = "megatron.core.tensor_parallel.random:"
BLOCK = "megatron.core.transformer.transformer_block:TransformerBlock."


def _checkpoint(original: Function) -> Function:
    """Without gradients there is no recompute, so nothing is kept for one: the next one would take it for its own."""

    @functools.wraps(original)
    def checkpoint(function: Function, distribute_saved_activations: bool, *args: Any) -> Any:
        if not torch.is_grad_enabled() and active_autocast() is not None:
            return function(*args)
        return original(function, distribute_saved_activations, *args)

    return checkpoint


def _checkpoint_function_forward(original: Function) -> Function:
    @functools.wraps(original)
    def forward(ctx: Any, run_function: Function, *args: Any, **kwargs: Any) -> Any:
        return original(ctx, remembering(run_function, track=any(ctx.needs_input_grad)), *args, **kwargs)

    return forward


def _checkpoint_without_output(original: Function) -> Function:
    """CheckpointWithoutOutput of 0.12; later ones restore the region themselves."""

    @functools.wraps(original)
    def checkpoint(self: Any, run_function: Function, *args: Any) -> Any:
        recomputes = torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        return original(self, remembering(run_function, track=recomputes), *args)

    return checkpoint


def _init(original: Function) -> Function:
    """From 0.13: no FP8 bookkeeping where there is no Transformer Engine to keep books with."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from megatron.core.tensor_parallel import random

        if not random.HAVE_TE:
            self.fp8 = False

    return __init__


def _recompute(original: Function) -> Function:
    """Up to 0.15: without a recorded forward pass there is nothing to recompute."""

    @functools.wraps(original)
    def _recompute(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if self.ctx is None else original(self, *args, **kwargs)

    return _recompute


def _keeping_scales(original: Function) -> Function:
    """CheckpointWithoutOutput from 0.13: the scales of its forward pass, with te-fp8-state."""

    @functools.wraps(original)
    def checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.fp8:
            return original(self, *args, **kwargs)
        self.forward_scales = ForwardScales(numbered=True)
        with self.forward_scales.recording():
            return original(self, *args, **kwargs)

    return checkpoint


def _with_its_scales(original: Function) -> Function:
    @functools.wraps(original)
    def _recompute(self: Any, *args: Any, **kwargs: Any) -> Any:
        # There is one recompute: the next call finds that, and returns.
        scales = vars(self).pop("forward_scales", None)
        with scales.replaying() if scales is not None else nullcontext():
            return original(self, *args, **kwargs)

    return _recompute


def _guarded_with_its_scales(original: Function) -> Function:
    return _with_its_scales(_recompute(original))


def _block_checkpointed_forward(original: Function) -> Function:
    """0.12: each recomputed layer in the region that it has without recompute."""

    @functools.wraps(original)
    def _checkpointed_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.enums import Fp8Recipe

        if not self.config.fp8 or self.config.fp8_recipe == Fp8Recipe.delayed:
            return original(self, *args, **kwargs)
        # The recomputed functions ask the block for its layers: a shallow copy, which only they see, answers them.
        view = copy.copy(self)
        view._get_layer = lambda number: _in_its_region(self._get_layer(number))
        return original(view, *args, **kwargs)

    return _checkpointed_forward


def _in_its_region(layer: Any) -> Function:
    from megatron.core.fp8_utils import get_fp8_context

    def run(*args: Any, **kwargs: Any) -> Any:
        with get_fp8_context(layer.config, layer.layer_number - 1):
            return layer(*args, **kwargs)

    return run


BINDINGS: dict[str, dict[str, Callable[[Function], Function]]] = {
    "block": {  # 0.12
        RANDOM + "checkpoint": _checkpoint,
        RANDOM + "CheckpointFunction.forward": _checkpoint_function_forward,
        RANDOM + "CheckpointWithoutOutput.checkpoint": _checkpoint_without_output,
        RANDOM + "CheckpointWithoutOutput._recompute": _recompute,
        BLOCK + "_checkpointed_forward": _block_checkpointed_forward,
    },
    "unguarded": {  # 0.13 to 0.15
        RANDOM + "checkpoint": _checkpoint,
        RANDOM + "CheckpointFunction.forward": _checkpoint_function_forward,
        RANDOM + "CheckpointWithoutOutput.__init__": _init,
        RANDOM + "CheckpointWithoutOutput.checkpoint": _keeping_scales,
        RANDOM + "CheckpointWithoutOutput._recompute": _guarded_with_its_scales,
    },
    "guarded": {  # from 0.16
        RANDOM + "checkpoint": _checkpoint,
        RANDOM + "CheckpointFunction.forward": _checkpoint_function_forward,
        RANDOM + "CheckpointWithoutOutput.__init__": _init,
        RANDOM + "CheckpointWithoutOutput.checkpoint": _keeping_scales,
        RANDOM + "CheckpointWithoutOutput._recompute": _with_its_scales,
    },
}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """The factories of a variant: target -> function from upstream's object to the one that takes its place."""
    return BINDINGS[variant]
