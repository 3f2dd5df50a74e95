"""Modules on the pretended device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from shim._torch_names import required

from .counts import uncounted
from .tensor import DeviceTensor

__all__ = ["module_moves", "moved_to_device"]


def moved_to_device(module: nn.Module) -> nn.Module:
    """Move a module in place, as module.cuda() does: weights and buffers, each once, with all their attributes."""
    known: dict[int, DeviceTensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not isinstance(tensor, DeviceTensor):
                    tensors[name] = _moved(tensor, known)
    return module


def _moved(tensor: Tensor, known: dict[int, DeviceTensor]) -> Any:
    if id(tensor) not in known:
        with uncounted(), torch.no_grad():
            found: Any = DeviceTensor(tensor.detach().clone())
        if isinstance(tensor, nn.Parameter):
            found = nn.Parameter(found, requires_grad=tensor.requires_grad)
        for name, value in vars(tensor).items():
            setattr(found, name, value)
        found.of_host = tensor  # kept, so that its id is not given to another
        known[id(tensor)] = found
    return known[id(tensor)]


@contextlib.contextmanager
def module_moves() -> Iterator[None]:
    """Let Module.cuda and Module.to(device) use it: torch's own makes new weights, without their attributes."""
    to, parsed = nn.Module.to, required("torch:_C._nn._parse_to")

    def cuda(module: nn.Module, device: Any = None) -> nn.Module:
        return moved_to_device(module)

    def to_device(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, *_ = parsed(*args, **kwargs)
        if device is not None and device.type == "cuda":
            moved_to_device(module)
            return module if dtype is None else to(module, dtype)
        return to(module, *args, **kwargs)

    with mock.patch.object(nn.Module, "cuda", cuda), mock.patch.object(nn.Module, "to", to_device):
        yield
