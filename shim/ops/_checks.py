"""Value checks without a device sync."""

from __future__ import annotations

from torch import Tensor

from shim._torch_names import find

__all__ = ["require"]

_assert_async = find("torch:_assert_async")  # asked once, because compiled functions call `require`


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
