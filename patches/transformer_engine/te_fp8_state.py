"""The FP8 state of Transformer Engine: in a recompute, and when a region cannot be entered.

What is wrong, since when:
- 2.1: `checkpoint` recomputes outside of the FP8 region it was called in, so what ran in FP8 is recomputed in BF16, or
  fails with delayed scaling. 2.2 restores the region.
- 2.1 to 2.3, delayed scaling: while a layer recomputes with the scales of its forward pass, what was updated since is
  kept by reference, and so overwritten: after the recompute the update is lost. 2.4 keeps copies.
- 2.2 to 2.20, delayed scaling: leaving the restored region reduces amax over ranks and moves every amax history on,
  once for each recomputed chunk, although the region of the forward pass has done so. Histories forget earlier than
  amax_history_len says, scales differ from those without recompute, and each chunk costs a collective.
- entering a region that the GPU cannot do raises after the state was set, and leaves FP8 switched on for everything
  that comes. 2.7 looks first, but not for NVFP4 and not where no recipe is given.

The rule: a recompute runs in the region of its forward pass and leaves scales and histories as they were; a region that
cannot be entered leaves nothing behind.

What megatron-core needs of `checkpoint` is the reentrant one; in 2.1 that with use_reentrant=False is left as it is.
The region that `checkpoint` restores from 2.2 on has no amax group; in a recompute none is used.

Upstream: open. Delete a variant when its releases are no longer supported, and the patch when leaving a region in a
recompute reduces nothing and a failed entry restores the state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function
from shim.patches._autocast import remembering

CHECKPOINT = "transformer_engine.pytorch.distributed:_CheckpointFunction."
FP8 = "transformer_engine.pytorch.fp8:FP8GlobalStateManager."
QUANTIZATION = "transformer_engine.pytorch.quantization:FP8GlobalStateManager."  # its place from 2.9


def _forward(original: Function) -> Function:
    """2.1: the region is kept in the recomputed function; which phase it is in, `checkpoint` itself says."""

    @functools.wraps(original)
    def forward(ctx: Any, run_function: Function, *args: Any, **kwargs: Any) -> Any:
        return original(ctx, remembering(run_function, track=False), *args, **kwargs)

    return forward


def _get_old_fp8_meta_tensors_for_recompute(original: Function) -> Function:
    """Up to 2.3: copies of scale and amax history in the place of references to what is about to be overwritten."""

    @functools.wraps(original)
    def get_old_fp8_meta_tensors_for_recompute(cls: Any, fp8_meta: dict[str, Any]) -> None:
        names = {"amax_history": "updated_amax_history_fwd", "scale": "updated_scale_fwd"}
        state = fp8_meta["scaling_fwd"]
        # Other recipes have no history, and nothing is kept for them.
        copies = {name: getattr(state, name).clone() for name in names if hasattr(state, "amax_history")}
        original(cls, fp8_meta)
        fp8_meta.update({names[name]: copy for name, copy in copies.items()})

    return get_old_fp8_meta_tensors_for_recompute


def _autocast_enter(original: Function) -> Function:
    """A region that cannot be entered leaves nothing behind."""

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
    """From 2.2: in a recompute no region reduces amax when it ends."""

    @functools.wraps(original)
    def autocast_exit(cls: Any, *args: Any, **kwargs: Any) -> None:
        from transformer_engine.pytorch.distributed import in_fp8_activation_recompute_phase

        if not in_fp8_activation_recompute_phase():
            return original(cls, *args, **kwargs)
        with torch.no_grad():  # that is what it goes by
            return original(cls, *args, **kwargs)

    return autocast_exit


Bindings = dict[str, Callable[[Function], Function]]

ENTER_AND_EXIT: Bindings = {FP8 + "fp8_autocast_enter": _autocast_enter, FP8 + "fp8_autocast_exit": _autocast_exit}
KEEPS: Bindings = {FP8 + "get_old_fp8_meta_tensors_for_recompute": _get_old_fp8_meta_tensors_for_recompute}

BINDINGS: dict[str, Bindings] = {
    "checkpoint": {CHECKPOINT + "forward": _forward, **KEEPS, **ENTER_AND_EXIT},  # 2.1
    "references": {**KEEPS, **ENTER_AND_EXIT},  # 2.2, 2.3
    "fp8_autocast": ENTER_AND_EXIT,  # 2.4 to 2.8
    "autocast": {  # from 2.9
        QUANTIZATION + "autocast_enter": _autocast_enter,
        QUANTIZATION + "autocast_exit": _autocast_exit,
    },
}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """The factories of a variant: target -> function from upstream's object to the one that takes its place."""
    return BINDINGS[variant]
