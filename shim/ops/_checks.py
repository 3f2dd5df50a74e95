"""Checks of tensors, and of what happens to the calls on them, without a device sync."""

from __future__ import annotations

import torch
from torch import Tensor

from shim._torch_names import find

__all__ = ["capturing", "is_plain", "require", "tracing"]

# Classes of tensors that have memory and nothing else: shim.testing.pretend_cuda adds that of its tensors.
PLAIN: tuple[type, ...] = (Tensor,)

# Asked for once, because compiled functions call `require`, and packed rows ask `tracing` for each rotation.
_assert_async = find("torch:_assert_async")
_MODES, _mode_of = find("torch:_C._TorchDispatchModeKey.__members__"), find("torch:_C._get_dispatch_mode")


def is_plain(tensor: object) -> bool:
    """Whether it is a tensor of torch itself. A subclass, such as a quantized tensor, may hold other memory."""
    return type(tensor) in PLAIN


def require(condition: Tensor, message: str) -> None:
    """Raise ValueError if `condition` (bool, 0-dimensional) is false.

    On CUDA a device-side assertion fails instead, because reading the condition would make the host wait. Tensors on
    the meta device have no values, so nothing is checked there.
    """
    if condition.device.type == "cuda":
        if _assert_async is not None:
            _assert_async(condition, message)
    elif condition.device.type != "meta" and not bool(condition):
        raise ValueError(message)


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph. Then the host can neither decide nor wait."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def tracing() -> bool:
    """Whether a dispatch mode is active, such as torch.compile's trace, under which operators get no real tensors."""
    if _MODES is None or _mode_of is None:
        return torch.compiler.is_compiling()
    return any([_mode_of(key) is not None for key in _MODES.values()])  # noqa: C419 - a generator takes a frame a key
