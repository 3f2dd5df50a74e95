"""FP8 and FP4 contexts under activation recompute.

What is wrong (0.12 to 0.20 unless noted):
- tensor_parallel.checkpoint restores random states in a recompute, but not the FP8/FP4 autocast region. The recompute
  runs outside the region: in BF16, or it crashes.
- CheckpointWithoutOutput raises a NameError without Transformer Engine (0.13 and later). Its recompute fails if no
  forward pass was recorded (up to 0.15). In 0.12 it also does not restore the region.
- TransformerBlock of 0.12 recomputes outside the regions of its layers, which all recipes but delayed scaling need.
  Forward and recompute then run unquantized.

The patch: a recompute runs in the region that was active around the forward pass: the same recipe and group, quantizing
or calibrating as before. With delayed scaling the recompute also uses the scales of the forward pass, as Transformer
Engine's own checkpoint does. Nothing changes if no region was active. The recomputed function holds the region, so the
patch also works if a trainer has replaced CheckpointFunction.backward.

With te-fp8-state each checkpoint holds its own scales: backward may run in any order and more than once, and
checkpoints may nest. Without te-fp8-state, tensor_parallel.checkpoint puts the scales back into Transformer Engine's
queues before each recompute (_fp8_queues), and CheckpointWithoutOutput from 0.13 takes them first in, first out, as
upstream does.

Covered: tensor_parallel.checkpoint, all callers of it or of CheckpointFunction (attention, MoE, MLP, TransformerBlock,
recompute.py), CheckpointWithoutOutput, and TransformerBlock of 0.12.

Not covered:
- te_checkpoint is right (on Transformer Engine 2.1 with te-fp8-state). TransformerBlock and recompute.py use it under
  FP8 and FP4.
- torch.utils.checkpoint belongs to torch.
- CheckpointWithoutOutput keeps its bookkeeping. It sets `fp8` even if the argument is False, on purpose: amax of layer
  norms and activations depends on it. From 0.13 it restores the recipe but not the group, as upstream does.

Upstream: Megatron-LM issue 7538 (open).

Delete when: CheckpointFunction restores the FP8/FP4 region upstream, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from shim.patches._arguments import Function
from shim.patches._autocast import active_autocast, remembering
from shim.patches._fp8_scales import ForwardScales
from shim.patches._views import view_with

RANDOM = "megatron.core.tensor_parallel.random:"
BLOCK = "megatron.core.transformer.transformer_block:TransformerBlock."


def _checkpoint(original: Function) -> Function:
    """Without gradients nothing is recomputed, so no scales are queued, which a later recompute would wrongly take."""

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
    """CheckpointWithoutOutput of 0.12. Later releases restore the region themselves."""

    @functools.wraps(original)
    def checkpoint(self: Any, run_function: Function, *args: Any) -> Any:
        recomputes = torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        return original(self, remembering(run_function, track=recomputes), *args)

    return checkpoint


def _init(original: Function) -> Function:
    """From 0.13: no FP8 bookkeeping without Transformer Engine."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from megatron.core.tensor_parallel import random

        if not random.HAVE_TE:
            self.fp8 = False

    return __init__


def _recompute(original: Function) -> Function:
    """Up to 0.15: returns early if no forward pass was recorded."""

    @functools.wraps(original)
    def _recompute(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if self.ctx is None else original(self, *args, **kwargs)

    return _recompute


def _keeping_scales(original: Function) -> Function:
    """CheckpointWithoutOutput from 0.13: keeps the scales of its forward pass, with te-fp8-state."""

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
        # Only the first call recomputes; later calls return early.
        scales = vars(self).pop("forward_scales", None)
        with scales.replaying() if scales is not None else nullcontext():
            return original(self, *args, **kwargs)

    return _recompute


def _guarded_with_its_scales(original: Function) -> Function:
    return _with_its_scales(_recompute(original))


def _block_checkpointed_forward(original: Function) -> Function:
    """0.12: each recomputed layer runs in the region that it has without recompute."""

    @functools.wraps(original)
    def _checkpointed_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.enums import Fp8Recipe

        if not self.config.fp8 or self.config.fp8_recipe == Fp8Recipe.delayed:
            return original(self, *args, **kwargs)
        # The recomputed functions get their layers from the block. They see a view of it with wrapped layers.
        view = view_with(self, _get_layer=lambda number: _in_its_region(self._get_layer(number), self.config))
        return original(view, *args, **kwargs)

    return _checkpointed_forward


def _in_its_region(layer: Any, config: Any) -> Function:
    """config: of the block, by which upstream chooses the region. A layer need have none."""
    from megatron.core.fp8_utils import get_fp8_context

    def run(*args: Any, **kwargs: Any) -> Any:
        with get_fp8_context(config, layer.layer_number - 1):
            return layer(*args, **kwargs)

    return run


BINDINGS: dict[str, dict[str, Callable[[Function], Function]]] = {
    "v0_12": {
        RANDOM + "checkpoint": _checkpoint,
        RANDOM + "CheckpointFunction.forward": _checkpoint_function_forward,
        RANDOM + "CheckpointWithoutOutput.checkpoint": _checkpoint_without_output,
        RANDOM + "CheckpointWithoutOutput._recompute": _recompute,
        BLOCK + "_checkpointed_forward": _block_checkpointed_forward,
    },
    "v0_13": {  # recomputes without asking whether a forward pass was recorded
        RANDOM + "checkpoint": _checkpoint,
        RANDOM + "CheckpointFunction.forward": _checkpoint_function_forward,
        RANDOM + "CheckpointWithoutOutput.__init__": _init,
        RANDOM + "CheckpointWithoutOutput.checkpoint": _keeping_scales,
        RANDOM + "CheckpointWithoutOutput._recompute": _guarded_with_its_scales,
    },
    "v0_16": {
        RANDOM + "checkpoint": _checkpoint,
        RANDOM + "CheckpointFunction.forward": _checkpoint_function_forward,
        RANDOM + "CheckpointWithoutOutput.__init__": _init,
        RANDOM + "CheckpointWithoutOutput.checkpoint": _keeping_scales,
        RANDOM + "CheckpointWithoutOutput._recompute": _with_its_scales,
    },
}


def probe(module: Any, method: str, models: list[Any]) -> bool | str:
    """See docs/patch-modules.md. Of methods of models only TransformerBlock's of 0.12 is bound, for FP8 only."""
    if method.startswith(BLOCK) and not module.config.fp8:
        return True
    return "shim cannot run FP8 on a tiny input"


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return BINDINGS[variant]
