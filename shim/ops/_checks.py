"""Checks of tensors without a device sync."""

from __future__ import annotations

from torch import Tensor

from shim._torch_names import find

__all__ = ["is_plain", "require"]

# Classes of tensors that have memory and nothing else: shim.testing.pretend_cuda adds that of its tensors.
PLAIN: tuple[type, ...] = (Tensor,)

_assert_async = find("torch:_assert_async")  # asked once, because compiled functions call `require`


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
