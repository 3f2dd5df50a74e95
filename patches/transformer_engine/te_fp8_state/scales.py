"""Defects 2 and 4, in modules: scales go to the checkpoints that record, and come from the one that recomputes.

Every module of Transformer Engine calls copy_forward_fp8_meta_tensors_for_recompute in a tracked forward pass, and
get_old_fp8_meta_tensors_for_recompute in a recompute. Both work on a queue. They get one whose entries are those of the
checkpoint (`own_queue`), and the queues of the process stay empty.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from shim.patches._arguments import Function
from shim.patches._fp8_scales import BY_CHECKPOINT, POSITION, ScalesError, number, own_queue, recording, replay


def patch_copy_forward(original: Function) -> Function:
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


def patch_get_old(original: Function) -> Function:
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


def patch_get_old_with_copies(original: Function) -> Function:
    """2.1 to 2.3: also keeps the update that the recompute would overwrite."""
    return patch_get_old(_with_copies(original))


def _with_copies(original: Function) -> Function:
    """Copies scale and amax history, because the referenced tensors are about to be overwritten."""

    @functools.wraps(original)
    def get_old_fp8_meta_tensors_for_recompute(cls: Any, fp8_meta: dict[str, Any]) -> None:
        names = {"amax_history": "updated_amax_history_fwd", "scale": "updated_scale_fwd"}
        state = fp8_meta["scaling_fwd"]
        # Other recipes have no history, so there is nothing to copy.
        copies = {name: getattr(state, name).clone() for name in names if hasattr(state, "amax_history")}
        original(cls, fp8_meta)
        fp8_meta.update({names[name]: copy for name, copy in copies.items()})

    return get_old_fp8_meta_tensors_for_recompute


def patch_init_fp8_metadata(original: Function) -> Function:
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
