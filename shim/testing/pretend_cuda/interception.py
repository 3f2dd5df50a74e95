"""What torch decides above its operations, by the device that C++ sees: turned so that it suits the pretended one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .operations import is_cuda
from .state import state
from .tensor import DEVICE, DeviceTensor

__all__ = ["Intercepting"]

_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
_NUMBERS = (bool, int, float)


class Intercepting(TorchFunctionMode):
    """In this thread: devices as numbers, data of Python that becomes a tensor of the device, and pinned memory."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if is_cuda_argument(given.get("device")):
            given["device"] = DEVICE
        handler = _HANDLERS.get(function)
        if handler is not None:
            return handler(function, list(args), given)
        if function in _FROM_DATA:
            return _from_data(function, args, given)
        if given.pop("pin_memory", False) and given.get("device") is None:
            return state().pin(function(*args, **given))
        return function(*args, **given)


def is_cuda_argument(device: Any) -> bool:
    """Whether it is a device at all, and the pretended one. Some functions take other things by that name."""
    try:
        return is_cuda(device)
    except (TypeError, RuntimeError):
        return False


def _from_data(function: Any, args: Sequence[Any], given: dict[str, Any]) -> Any:
    """torch.tensor: data of Python is put together on the host, and copied if it is for the device."""
    device = given.pop("device", None)
    pinned = given.pop("pin_memory", False)
    if args and isinstance(args[0], DeviceTensor):
        found = args[0].detach()
        found = found.to(given["dtype"]) if given.get("dtype") is not None else found
        return found.clone() if function is torch.tensor else found
    args = [_numbers(part) for part in args]
    if not is_cuda_argument(device):
        given = given if device is None else {**given, "device": device}
        found = function(*args, **given)
        return state().pin(found) if pinned else found
    needs_gradient = given.pop("requires_grad", False)
    return function(*args, **given).to(DEVICE).requires_grad_(needs_gradient)


def _numbers(data: Any) -> Any:
    """Data of Python in which tensors of the device are numbers, which the host reads one by one."""
    if isinstance(data, (list, tuple)):
        return [_numbers(part) for part in data]
    return data.tolist() if isinstance(data, DeviceTensor) else data


def _new_tensor(function: Any, args: list[Any], given: dict[str, Any]) -> Any:
    like, *data = args
    given.setdefault("device", like.device)
    given.setdefault("dtype", like.dtype)
    if not data:
        data = [given.pop("data")]
    return _from_data(torch.tensor, data, given)


def _device(function: Any, args: list[Any], given: dict[str, Any]) -> Any:
    """torch.device(0), which a torch without a GPU refuses."""
    if len(args) == 1 and isinstance(args[0], int):
        args = [DEVICE.type, args[0]]
    return function(*args, **given)


def _to(function: Any, args: list[Any], given: dict[str, Any]) -> Any:
    """Tensor.to: what is on the device stays, without an operation."""
    tensor = args[0]
    if len(args) > 1 and is_cuda_argument(args[1]):
        args[1] = DEVICE
    if isinstance(tensor, DeviceTensor):
        if len(args) > 1 and isinstance(args[1], Tensor) and args[1].device == DEVICE:
            args[1] = args[1].dtype
        if len(args) > 1 and args[1] == DEVICE:
            del args[1]
            if len(args) > 2:  # to(device, dtype, non_blocking)
                del args[2:]
        elif given.get("device") == DEVICE:
            del given["device"]
        given.pop("non_blocking", None)
        if len(args) == 1 and given.get("dtype") is None and not given.get("copy"):
            return tensor
        if len(args) == 1 and set(given) == {"copy"}:
            return tensor.clone()
    elif len(args) > 1 and isinstance(args[1], DeviceTensor):
        args[1:2] = [DEVICE, args[1].dtype]
    return function(*args, **given)


def _cuda(function: Any, args: list[Any], given: dict[str, Any]) -> Any:
    if isinstance(args[0], DeviceTensor):
        return args[0]
    non_blocking = given.get("non_blocking", args[2] if len(args) > 2 else False)
    return args[0].to(DEVICE, non_blocking=non_blocking)


def _pin_memory(function: Any, args: list[Any], given: dict[str, Any]) -> Any:
    if isinstance(args[0], DeviceTensor):
        return args[0].pin_memory()
    return args[0] if state().is_pinned(args[0]) else state().pin(args[0].clone())


def _is_pinned(function: Any, args: list[Any], given: dict[str, Any]) -> Any:
    return not isinstance(args[0], DeviceTensor) and state().is_pinned(args[0])


def _getitem(function: Any, args: list[Any], given: dict[str, Any]) -> Any:
    tensor, index = args
    return function(tensor, _indices_on_device(index) if isinstance(tensor, DeviceTensor) else index)


def _setitem(function: Any, args: list[Any], given: dict[str, Any]) -> Any:
    tensor, index, value = args
    if isinstance(tensor, DeviceTensor):
        index = _indices_on_device(index)
        if isinstance(value, _NUMBERS) and _has_mask(index):  # C++ keeps the number on the host, for CUDA only
            value = torch.tensor(value, dtype=tensor.dtype)
    return function(tensor, index, value)


def _indices_on_device(index: Any) -> Any:
    """Lists as tensors of the device, which C++ would make where it believes the tensor to be."""
    if isinstance(index, tuple):
        return tuple(_indices_on_device(part) for part in index)
    if isinstance(index, (list, range)):
        return torch.tensor(list(index)).to(DEVICE)
    return index


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


_HANDLERS: dict[Any, Any] = {
    torch.device: _device,
    Tensor.to: _to,
    Tensor.cuda: _cuda,
    Tensor.new_tensor: _new_tensor,
    Tensor.pin_memory: _pin_memory,
    Tensor.is_pinned: _is_pinned,
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
}
