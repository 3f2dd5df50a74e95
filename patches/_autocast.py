"""The FP8/FP4 autocast state of Transformer Engine: taken in a forward pass, entered again in its recompute.

The module uses only names that every release from 2.1 has, and `autocast`, which replaced `fp8_autocast` in 2.9.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from shim.patches._fp8_queues import OwnEntries, scales_stay_with_checkpoints
from shim.patches._fp8_scales import ForwardScales, own_flags
from shim.patches._recomputed import Recomputed


class Autocast(NamedTuple):
    """The state of an autocast region: whether it quantizes or calibrates, its recipe, and its amax group."""

    enabled: bool
    calibrating: bool
    recipe: Any
    group: Any


def active_autocast() -> Autocast | None:
    """The region around this call; None outside a region or in a disabled one."""
    # Only loaded modules matter: without Transformer Engine there is no region.
    loaded = (sys.modules.get(f"transformer_engine.pytorch.{name}") for name in ("quantization", "fp8"))
    manager = next((module.FP8GlobalStateManager for module in loaded if module is not None), None)
    if manager is None or not (manager.is_fp8_enabled() or manager.is_fp8_calibration()):
        return None
    enabled, calibrating = manager.is_fp8_enabled(), manager.is_fp8_calibration()
    return Autocast(enabled, calibrating, manager.get_fp8_recipe(), manager.get_fp8_group())


def _region(state: Autocast) -> AbstractContextManager[Any]:
    from transformer_engine import pytorch as te

    enabled, calibrating, recipe, group = state
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, calibrating=calibrating, recipe=recipe, amax_reduction_group=group)
    return te.fp8_autocast(enabled=enabled, calibrating=calibrating, fp8_recipe=recipe, fp8_group=group)


@contextmanager
def entered(state: Autocast) -> Iterator[None]:
    """Enter the region `state` again, inside any region."""
    region = _region(state)
    region.__enter__()
    try:
        yield
    finally:
        # Leaving the outermost region with gradients enabled reduces amax and updates scales. The forward pass has
        # already done so; a second update from the same values would change the scales.
        with torch.no_grad():
            region.__exit__(None, None, None)


@contextmanager
def _tracked(recompute_phase: bool, flags: list[Any]) -> Iterator[None]:
    """Let Transformer Engine keep the scales of the forward pass, and use them in the recompute.

    `flags` holds whether the first module of the region is still to come. The forward pass fills it, a recompute reads.
    """
    from transformer_engine.pytorch.distributed import activation_recompute_forward

    region = activation_recompute_forward(activation_recompute=True, recompute_phase=recompute_phase)
    with own_flags(flags):
        region.__enter__()
    try:
        yield
    finally:
        region.__exit__(None, None, None)


def _in_tracked_region() -> bool:
    from transformer_engine.pytorch import distributed

    return distributed.is_fp8_activation_recompute_enabled() or distributed.in_fp8_activation_recompute_phase()


def remembering(function: Callable[..., Any], track: bool) -> Callable[..., Any]:
    """A checkpoint's `function` that runs in the current autocast region from its second call on.

    Returns `function` itself if no region is active. With `track`, delayed scaling uses the scales of the first call in
    all later calls. Transformer Engine's own checkpoint needs no `track`. A checkpoint nested in a tracked one is
    tracked only with te-fp8-state.
    """
    state = active_autocast()
    if state is None:
        return function
    track = track and state.enabled
    return Recomputed(function, (_with_its_scales if track else _in_its_region)(function, state))


def _in_its_region(function: Callable[..., Any], state: Autocast) -> Callable[..., Any]:
    first = True

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        again, first = not first, False
        with entered(state) if again else nullcontext():
            return function(*args, **kwargs)

    return run


def _with_its_scales(function: Callable[..., Any], state: Autocast) -> Callable[..., Any]:
    # Inside a tracked region the flags are already right for the first call.
    tracked = not _in_tracked_region()
    scales, flags = ForwardScales(), list[Any]()
    # te-fp8-state fills `scales`. Without it the scales are in queues, which only delayed scaling uses.
    queued = tracked and not scales_stay_with_checkpoints() and _has_scales(state.recipe)
    entries = OwnEntries()
    first = True

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        if first:
            first = False
            with (
                scales.recording(),
                entries.recording() if queued else nullcontext(),
                _tracked(recompute_phase=False, flags=flags) if tracked else nullcontext(),
            ):
                return function(*args, **kwargs)
        with (
            entered(state),
            scales.replaying(),
            entries.replaying() if queued else nullcontext(),
            _tracked(recompute_phase=True, flags=list(flags)) if tracked or scales else nullcontext(),
        ):
            result = function(*args, **kwargs)
        scales.release()
        return result

    return run


def _has_scales(recipe: Any) -> bool:
    custom = getattr(recipe, "custom", None)  # later releases: a recipe with any quantizers
    return bool(recipe.delayed() or (custom is not None and custom()))
