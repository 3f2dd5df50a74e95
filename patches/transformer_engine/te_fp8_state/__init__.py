"""The FP8 state of Transformer Engine in a recompute, and after a region that cannot be entered.

What is wrong:
- 2.1: `checkpoint` recomputes outside the FP8 region of its call. The recompute runs in BF16, or fails with delayed
  scaling. 2.2 restores the region.
- 2.1 to 2.3, delayed scaling: a layer recomputes with the scales of its forward pass. Meanwhile the updated scales are
  kept by reference and so overwritten: after the recompute the update is lost. 2.4 keeps copies.
- 2.2 to 2.20, delayed scaling: leaving the restored region reduces amax over ranks and moves every amax history on,
  once for each recomputed chunk, although the forward pass has already done so. Histories forget earlier than
  amax_history_len says, scales differ from those without recompute, and each chunk costs a collective.
- 2.1 to 2.20, delayed scaling: queues of the process, first in, first out, keep what a recompute takes again (scales,
  amax histories, whether the first module of the region is still to come). A recompute takes the scales of another
  forward pass if backward runs in another order (one layer for several depths of MTP, two microbatches) or if a forward
  pass never ran backward. A second backward (retain_graph) finds no scales, nor does a module in evaluation mode (up to
  2.19).
- A nested checkpoint ends the tracking of the outer one, and its own recompute takes the current scales.
- A recompute that raises leaves its modules with the scales of the forward pass.
- Entering a region that the GPU does not support raises after the state was set, and leaves FP8 switched on for all
  that follows. 2.7 checks first, but not for NVFP4 and not without a recipe.

The patch: a recompute runs in the region of its forward pass, takes the scales of that forward pass, and leaves scales
and histories as they were. A region that cannot be entered leaves no trace. Every checkpoint keeps the scales of its
own forward pass (_fp8_scales), so the scales are freed with the checkpoint.

megatron-core uses the reentrant `checkpoint`, so in 2.1 use_reentrant=False does not change. The region that
`checkpoint` restores from 2.2 on has no amax group; a recompute uses none.

Not covered: operations of transformer_engine.pytorch.ops, which Transformer Engine's own bookkeeping leaves out too;
LayerNormMLP(checkpoint=True), which recomputes itself and keeps its queue; the scales of gradients, which every
recomputed module moves on (upstream). FP8 attention in a module in evaluation mode (2.8 to 2.19) keeps no scales: its
recompute raises ScalesError.

Upstream: open. Delete a variant when its releases are no longer supported, and the patch when leaving a region in a
recompute reduces nothing and a failed entry restores the state.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from shim.patches._arguments import Function
from shim.patches._autocast import remembering
from shim.patches._fp8_scales import (
    BY_CHECKPOINT,
    POSITION,
    ForwardScales,
    ScalesError,
    Within,
    number,
    own_flags,
    own_queue,
    recording,
    replay,
)

DISTRIBUTED = "transformer_engine.pytorch.distributed:"
CHECKPOINT = DISTRIBUTED + "_CheckpointFunction."
MODULE = "transformer_engine.pytorch.module.base:TransformerEngineBaseModule."
FP8 = "transformer_engine.pytorch.fp8:FP8GlobalStateManager."
QUANTIZATION = "transformer_engine.pytorch.quantization:FP8GlobalStateManager."  # its place from 2.9


def _forward(original: Function) -> Function:
    """2.1: the recomputed function holds the region. `checkpoint` itself tracks the phase."""

    @functools.wraps(original)
    def forward(ctx: Any, run_function: Function, *args: Any, **kwargs: Any) -> Any:
        return original(ctx, remembering(run_function, track=False), *args, **kwargs)

    return forward


def _get_old_fp8_meta_tensors_for_recompute(original: Function) -> Function:
    """Up to 2.3: copies scale and amax history, because the referenced tensors are about to be overwritten."""

    @functools.wraps(original)
    def get_old_fp8_meta_tensors_for_recompute(cls: Any, fp8_meta: dict[str, Any]) -> None:
        names = {"amax_history": "updated_amax_history_fwd", "scale": "updated_scale_fwd"}
        state = fp8_meta["scaling_fwd"]
        # Other recipes have no history, so there is nothing to copy.
        copies = {name: getattr(state, name).clone() for name in names if hasattr(state, "amax_history")}
        original(cls, fp8_meta)
        fp8_meta.update({names[name]: copy for name, copy in copies.items()})

    return get_old_fp8_meta_tensors_for_recompute


def _copy_forward_fp8_meta_tensors_for_recompute(original: Function) -> Function:
    """Scales that Transformer Engine would queue go to the checkpoints whose forward pass is running."""

    @functools.wraps(original)
    def copy_forward_fp8_meta_tensors_for_recompute(cls: Any, fp8_meta: dict[str, Any]) -> None:
        checkpoints = recording()
        if not checkpoints:
            original(cls, fp8_meta)
            return
        with own_queue(cls, fp8_meta, []) as queue:
            original(cls, fp8_meta)
        for scales, entry in itertools.product(checkpoints, queue):
            scales.keep(fp8_meta, entry)
        # The queue's number is part of a saved state, so the module gets one if Transformer Engine would give one.
        if queue and POSITION not in fp8_meta and any(scales.numbered for scales in checkpoints):
            number(cls, fp8_meta)

    vars(copy_forward_fp8_meta_tensors_for_recompute)[BY_CHECKPOINT] = True
    return copy_forward_fp8_meta_tensors_for_recompute


def _replayed(original: Function) -> Function:
    """Transformer Engine gets the scales of this checkpoint's forward pass instead of those in its queue."""

    @functools.wraps(original)
    def get_old_fp8_meta_tensors_for_recompute(cls: Any, fp8_meta: dict[str, Any]) -> None:
        from transformer_engine.pytorch.distributed import in_fp8_activation_recompute_phase

        now = replay()
        if now is None or not in_fp8_activation_recompute_phase():
            return original(cls, fp8_meta)
        entries = now.take(cls, fp8_meta)
        # A checkpoint nested in this recompute records its own forward pass.
        for scales, entry in itertools.product(recording(), entries):
            scales.keep(fp8_meta, entry)
        try:
            with own_queue(cls, fp8_meta, entries):
                original(cls, fp8_meta)
        except IndexError as error:
            if entries:
                raise
            raise ScalesError(
                "te-fp8-state: a module of Transformer Engine is recomputed under delayed scaling, and the forward "
                "pass of this checkpoint has kept no scales for it. It must run as it did in the forward pass: the "
                "same modules, as often, quantized as before. Attention in FP8 cannot be recomputed in evaluation mode"
            ) from error

    return get_old_fp8_meta_tensors_for_recompute


def _init_fp8_metadata(original: Function) -> Function:
    """Up to 2.19: keeps scales for a recompute in evaluation mode too. In training a module does so itself."""

    @functools.wraps(original)
    def init_fp8_metadata(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not recording() or self.training or not self.fp8:
            return
        from transformer_engine.pytorch import distributed

        if distributed.is_fp8_activation_recompute_enabled():
            manager = distributed.FP8GlobalStateManager
            with own_queue(manager, self.fp8_meta, []):  # stock gives it no number
                manager.copy_forward_fp8_meta_tensors_for_recompute(self.fp8_meta)

    return init_fp8_metadata


def _checkpoint_forward(original: Function) -> Function:
    @functools.wraps(original)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        ctx.forward_scales = ForwardScales(numbered=True)
        with ctx.forward_scales.recording():
            return original(ctx, *args, **kwargs)

    return forward


def _checkpoint_backward(original: Function) -> Function:
    @functools.wraps(original)
    def backward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        scales = getattr(ctx, "forward_scales", None)  # None if the forward pass ran before the patch was applied
        with scales.replaying() if scales is not None else nullcontext():
            result = original(ctx, *args, **kwargs)
        if scales is not None:
            scales.release()
        return result

    return backward


def _get_activation_recompute_contexts(original: Function) -> Function:
    """The contexts of a non-reentrant checkpoint: for its forward pass and for its recomputes."""

    @functools.wraps(original)
    def get_activation_recompute_contexts(*args: Any, **kwargs: Any) -> Any:
        forward, recompute = original(*args, **kwargs)
        scales = ForwardScales(numbered=True)
        return Within(scales.recording, forward), Within(scales.replaying, recompute)

    return get_activation_recompute_contexts


# The flags of a tracked region: up to 2.18, and from 2.19 on.
FLAGS = (
    ("_FP8_ACTIVATION_RECOMPUTE_ENABLED", "_FP8_ACTIVATION_RECOMPUTE_PHASE"),
    ("_IN_ACTIVATION_RECOMPUTE_REGION", "_ACTIVATION_RECOMPUTE_PHASE"),
)


def _region_enter(original: Function) -> Function:
    """Each tracked region keeps its own first-module flag. A forward pass in a recompute stays a forward pass."""

    @functools.wraps(original)
    def __enter__(self: Any) -> Any:
        from transformer_engine.pytorch import distributed

        found = {name: vars(distributed)[name] for names in FLAGS for name in names if name in vars(distributed)}
        vars(self).setdefault("flags_found", []).append(found)
        if not self.activation_recompute:
            return original(self)
        if not self.recompute_phase:
            if distributed.in_fp8_activation_recompute_phase():
                return None
            (*_, scales) = recording() or (None,)
            if scales is None or scales.is_first_module is not None:
                return original(self)
            with own_flags([]) as flags:
                original(self)
            (scales.is_first_module,) = flags
            return None
        now = replay()
        if now is None or now.entered:
            return original(self)
        now.entered = True
        with own_flags([now.scales.is_first_module]):
            return original(self)

    return __enter__


def _region_exit(original: Function) -> Function:
    """At its end, restores the flags of the outer tracked region."""

    @functools.wraps(original)
    def __exit__(self: Any, *exception: Any) -> Any:
        from transformer_engine.pytorch import distributed

        result = original(self, *exception)
        found = vars(self).get("flags_found")
        if found:  # empty if the region was entered before the patch was applied
            vars(distributed).update(found.pop())
        return result

    return __exit__


def _autocast_enter(original: Function) -> Function:
    """Restores the state if a region cannot be entered."""

    @functools.wraps(original)
    def autocast_enter(cls: Any, *args: Any, **kwargs: Any) -> None:
        prefix = "fp8_" if hasattr(cls, "get_fp8_autocast_state") else ""  # until 2.8
        depths = getattr(cls, "quantization_state", cls)  # an object of its own from 2.15
        depth = next(n for n in ("autocast_depth", "AUTOCAST_DEPTH", "FP8_AUTOCAST_DEPTH") if hasattr(depths, n))
        state, before = getattr(cls, f"get_{prefix}autocast_state")(), getattr(depths, depth)
        try:
            original(cls, *args, **kwargs)
        except BaseException:
            getattr(cls, f"set_{prefix}autocast_state")(state)
            setattr(depths, depth, before)
            raise

    return autocast_enter


def _autocast_exit(original: Function) -> Function:
    """From 2.2: the end of a region inside a recompute reduces no amax."""

    @functools.wraps(original)
    def autocast_exit(cls: Any, *args: Any, **kwargs: Any) -> None:
        from transformer_engine.pytorch.distributed import in_fp8_activation_recompute_phase

        # CheckpointWithoutOutput of megatron-core leaves its region after the recompute phase, hence replay().
        if not in_fp8_activation_recompute_phase() and replay() is None:
            return original(cls, *args, **kwargs)
        with torch.no_grad():  # upstream reduces amax only with gradients enabled
            return original(cls, *args, **kwargs)

    return autocast_exit


Bindings = dict[str, Callable[[Function], Function]]

TRACKED: Bindings = {
    CHECKPOINT + "forward": _checkpoint_forward,
    CHECKPOINT + "backward": _checkpoint_backward,
    DISTRIBUTED + "get_activation_recompute_contexts": _get_activation_recompute_contexts,
    DISTRIBUTED + "activation_recompute_forward.__enter__": _region_enter,
    DISTRIBUTED + "activation_recompute_forward.__exit__": _region_exit,
}
EVALUATION: Bindings = {MODULE + "init_fp8_metadata": _init_fp8_metadata}
COPY, GET = "copy_forward_fp8_meta_tensors_for_recompute", "get_old_fp8_meta_tensors_for_recompute"
UNTIL_2_8: Bindings = {
    **TRACKED,
    **EVALUATION,
    FP8 + COPY: _copy_forward_fp8_meta_tensors_for_recompute,
    FP8 + GET: _replayed,
    FP8 + "fp8_autocast_enter": _autocast_enter,
    FP8 + "fp8_autocast_exit": _autocast_exit,
}
FROM_2_9: Bindings = {
    **TRACKED,
    QUANTIZATION + COPY: _copy_forward_fp8_meta_tensors_for_recompute,
    QUANTIZATION + GET: _replayed,
    QUANTIZATION + "autocast_enter": _autocast_enter,
    QUANTIZATION + "autocast_exit": _autocast_exit,
}


def _replayed_from_copies(original: Function) -> Function:
    return _replayed(_get_old_fp8_meta_tensors_for_recompute(original))


def _checkpoint_forward_in_its_region(original: Function) -> Function:
    return _checkpoint_forward(_forward(original))


BINDINGS: dict[str, Bindings] = {
    "checkpoint": {  # 2.1
        **UNTIL_2_8,
        CHECKPOINT + "forward": _checkpoint_forward_in_its_region,
        FP8 + GET: _replayed_from_copies,
    },
    "references": {**UNTIL_2_8, FP8 + GET: _replayed_from_copies},  # 2.2, 2.3
    "fp8_autocast": UNTIL_2_8,  # 2.4 to 2.8
    "autocast": {**FROM_2_9, **EVALUATION},  # 2.9 to 2.19
    "evaluation": FROM_2_9,  # from 2.20
}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return BINDINGS[variant]
