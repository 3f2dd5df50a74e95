"""Value checks without a device sync."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["require"]


def require(condition: Tensor, message: str) -> None:
    """Raise ValueError if `condition` (bool, 0-dimensional) is false.

    On CUDA a device-side assertion fails instead, because reading the condition would make the host wait. Tensors on
    the meta device have no values, so nothing is checked there.
    """
    if condition.device.type == "cuda":
        torch._assert_async(condition, message)
    elif condition.device.type != "meta" and not bool(condition):
        raise ValueError(message)
