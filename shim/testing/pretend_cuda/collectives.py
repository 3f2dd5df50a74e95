"""NCCL's rules, over gloo: what NCCL would refuse is counted and runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType

import torch
from torch import Tensor

from .state import state
from .tensor import DeviceTensor

__all__ = ["check_for_nccl"]

# What torch's ProcessGroupNCCL has a type of NCCL for.
_DTYPES = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    *(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")),
}


def check_for_nccl(name: str, tensors: Sequence[Tensor]) -> None:
    """Count a collective, and each of its tensors that NCCL does not take."""
    if _moves_objects():
        return
    state().count("collectives", name)
    if name == "barrier":  # torch makes its tensor, on the device of the backend
        return
    for tensor in tensors:
        reason = _refused(tensor)
        if reason:
            state().count("refused_by_nccl", f"{name} of {reason}")


def _refused(tensor: Tensor) -> str:
    if not isinstance(tensor, DeviceTensor):
        return "a tensor of the CPU"
    if tensor.dtype not in _DTYPES:
        return str(tensor.dtype).removeprefix("torch.")
    return "" if tensor.is_contiguous() else "a tensor with gaps"


def _moves_objects() -> bool:
    """Whether torch sends a pickled object: on the CPU by gloo, on the device by NCCL."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name, module = frame.f_code.co_name, frame.f_globals.get("__name__", "")
        if module == "torch.distributed.distributed_c10d" and "object" in name:
            return True
        if not module.startswith(("torch.", "shim.testing.pretend_cuda")):
            return False
        frame = frame.f_back
    return False
