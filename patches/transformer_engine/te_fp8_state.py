"""The FP8 state of early Transformer Engine releases, in a recompute and when entering a region fails.

What is wrong, since when:
- 2.1: `checkpoint` recomputes outside of the FP8 region it was called in, so what ran in FP8 is recomputed in BF16, or
  fails with delayed scaling. 2.2 restores the region.
- 2.1 to 2.6: entering a region that the GPU cannot do raises after the state was set, and leaves FP8 switched on for
  everything that comes; 2.7 looks first.

What megatron-core needs of `checkpoint` is the reentrant one; that with use_reentrant=False is left as it is.

Delete when 2.1 to 2.6 are no longer supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function
from shim.patches._autocast import remembering

CHECKPOINT = "transformer_engine.pytorch.distributed:_CheckpointFunction."
MANAGER = "transformer_engine.pytorch.fp8:FP8GlobalStateManager."


def _forward(original: Function) -> Function:
    """2.1: the region is kept in the recomputed function; which phase it is in, `checkpoint` itself says."""

    @functools.wraps(original)
    def forward(ctx: Any, run_function: Function, *args: Any, **kwargs: Any) -> Any:
        return original(ctx, remembering(run_function, track=False), *args, **kwargs)

    return forward


def _fp8_autocast_enter(original: Function) -> Function:
    """Up to 2.6: a region that cannot be entered leaves nothing behind."""

    @functools.wraps(original)
    def fp8_autocast_enter(cls: Any, *args: Any, **kwargs: Any) -> None:
        state, depth = cls.get_fp8_autocast_state(), cls.FP8_AUTOCAST_DEPTH
        try:
            original(cls, *args, **kwargs)
        except BaseException:
            cls.set_fp8_autocast_state(state)
            cls.FP8_AUTOCAST_DEPTH = depth
            raise

    return fp8_autocast_enter


BINDINGS: dict[str, dict[str, Callable[[Function], Function]]] = {
    "checkpoint": {  # 2.1
        CHECKPOINT + "forward": _forward,
        MANAGER + "fp8_autocast_enter": _fp8_autocast_enter,
    },
    "enter": {MANAGER + "fp8_autocast_enter": _fp8_autocast_enter},  # 2.2 to 2.6
}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """The factories of a variant: target -> function from upstream's object to the one that takes its place."""
    return BINDINGS[variant]
