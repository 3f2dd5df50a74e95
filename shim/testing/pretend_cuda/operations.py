"""Every operation below autograd that touches the pretended device: checked as CUDA checks it, counted, and run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shim._torch_names import required

from .collectives import check_for_nccl
from .counts import is_uncounted
from .state import state
from .tensor import DEVICE, DeviceTensor, values_of
from .traffic import moved
from .trees import tensors_in, with_tensors

__all__ = ["Dispatching", "is_cuda", "run"]

aten: Any = torch.ops.aten

# Their sizes or results depend on values, so the host waits for them.
_READS = {
    "_local_scalar_dense",
    "_unique2",
    "allclose",
    "bincount",
    "equal",
    "histc",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
# They take a number, or a tensor of the CPU without dimensions, in the place of a tensor.
_TAKES_NO_NUMBER = {
    "addmm",
    "bmm",
    "bucketize",
    "cat",
    "embedding",
    "gather",
    "index_add_",
    "index_copy_",
    "index_select",
    "mm",
    "scatter",
    "scatter_",
    "scatter_add_",
    "stack",
}
_COLLECTIVES = ("c10d", "_c10d_functional")
_HOST_RESULTS = (bool, int, float)


_Mode: Any = required("torch.utils._python_dispatch:TorchDispatchMode")


class Dispatching(_Mode):  # type: ignore[misc]
    """Sees the operations without a tensor of the device: those that make one, and collectives."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return run(function, args, dict(kwargs or {}))


def is_cuda(device: Any) -> bool:
    """Whether an argument `device` means the pretended device, as far as Python shows it."""
    if isinstance(device, bool) or device is None:
        return False
    if isinstance(device, int):
        return True
    return torch.device(device).type == "cuda"


def run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values."""
    name = function.overloadpacket.__name__
    tensors = tensors_in((args, kwargs))
    if function.namespace == "prim" and name == "device":
        return DEVICE
    if function.namespace in _COLLECTIVES:
        return _collective(function, name, tensors, args, kwargs)
    here = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    to = kwargs.get("device")
    # What C++ makes like a tensor of the device asks for the device that C++ sees.
    to_device = to is not None and torch.device(to).type in ("cuda", "meta")
    if not here and not to_device:
        return function(*args, **kwargs)
    if to is not None:
        kwargs["device"] = torch.device("cpu")
    if function is aten._to_copy.default:
        return _copied(function, args, kwargs, to_device, to is not None and not to_device)
    if to is not None and not to_device:  # like a tensor of the device, on the host
        return function(*with_tensors(values_of, args), **kwargs)
    if function is aten.copy_.default:
        return _copied_into(function, *args)
    if torch.Tag.inplace_view in function.tags:
        raise NotImplementedError(f"the pretended device cannot change a tensor's shape in place: {function}")
    return _computed(function, name, tensors, args, kwargs)


# Copies


def _asked_to_copy(tensor: Tensor) -> str:
    return f"copy of {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _to_device(tensor: Tensor, non_blocking: Any) -> None:
    """Count a copy to the device. From memory that is not pinned it is blocking, unless asked otherwise."""
    what = f"{_asked_to_copy(tensor)} to the device"
    if non_blocking:
        if not state().is_pinned(tensor):
            state().not_while_capturing(f"{what} from memory that is not pinned")
        state().count("asynchronous_copies", what)
    else:
        state().blocking_copy(what)


def _to_host(tensor: Tensor, non_blocking: Any) -> None:
    what = f"{_asked_to_copy(tensor)} to the host"
    if non_blocking:
        state().count("asynchronous_copies", what)
    else:
        state().host_waits(what)


def _copied(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], to_device: bool, to_host: bool) -> Any:
    """Tensor.to: between host and device, or to another dtype."""
    source, non_blocking = args[0], kwargs.pop("non_blocking", False)
    if not isinstance(source, DeviceTensor):
        _to_device(source, non_blocking)
        found = function(source, **kwargs)
        return DeviceTensor(found.clone() if found is source else found)
    if to_host:
        _to_host(source, non_blocking)
        found = function(source.values, **kwargs)
        return found.clone() if found is source.values else found
    found = function(source.values, **kwargs)
    _launched(function, "_to_copy", (source.values,), {}, found)
    return DeviceTensor(found)


def _copied_into(function: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Tensor.copy_: between host and device, or on the device."""
    if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
        _will_write([target])
        function(target.values, source.values)
        _launched(function, "copy_", (target.values, source.values), {}, target.values)
        return target
    if isinstance(target, DeviceTensor):
        _to_device(source, non_blocking)
        _will_write([target])
    else:
        _to_host(source, non_blocking)
    function(values_of(target), values_of(source))
    return target


# All else


def _computed(
    function: Any, name: str, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    _check_devices(function, name, [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)])
    if name == "_assert_async" and not bool(args[0].values):
        raise state().fault(f"device-side assertion {args[1:]}")
    what = _waits(name, args, kwargs)
    if what:
        state().host_waits(what)
    given, written = with_tensors(values_of, (args, kwargs)), _written(function, args, kwargs)
    _will_write(written.values())
    found = _ON_CPU.get(function, function)(*given[0], **given[1])
    if isinstance(found, _HOST_RESULTS):
        return found
    _launched(function, name, given[0], given[1], found)

    def on_device(values: Tensor) -> DeviceTensor:
        return written[id(values)] if id(values) in written else DeviceTensor(values)

    return with_tensors(on_device, found)


def _check_devices(function: Any, name: str, of_host: Sequence[Tensor]) -> None:
    """Of the CPU, a kernel takes numbers only. Indices of the CPU are copied."""
    for tensor in of_host:
        if name in _INDEXED:
            if tensor.dim():
                state().blocking_copy(f"{_asked_to_copy(tensor)} to the device, an index")
        elif tensor.dim() or name in _TAKES_NO_NUMBER:
            shape = tuple(tensor.shape)
            raise state().fault(f"a tensor of the CPU {shape} beside tensors of the device in {function}")


def _waits(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why the host waits for this operation; "" if it does not."""
    if name in _READS:
        return name
    if name in _INDEXED and _indexed_by_mask(name, args):
        return f"{name} by a mask"
    if name == "repeat_interleave" and isinstance(args[-1], Tensor) and kwargs.get("output_size") is None:
        return "repeat_interleave without its output_size"
    return ""


def _indexed_by_mask(name: str, args: Sequence[Any]) -> bool:
    indices: Iterable[Any] = args[1] or ()
    masks = [index for index in indices if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)]
    # The only mask, with a number of the host to write, is a masked_fill.
    fills = name != "index" and len(args[1]) == 1 and args[2].numel() == 1 and not isinstance(args[2], DeviceTensor)
    return bool(masks) and not fills


def _written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, DeviceTensor]:
    """id of values -> the tensor of the device that the operation writes and returns."""
    found = {}
    for place, argument in enumerate(function._schema.arguments if function._schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            found.update({id(t.values): t for t in tensors_in(given) if isinstance(t, DeviceTensor)})
    return found


def _will_write(tensors: Iterable[DeviceTensor]) -> None:
    graph = state().capture
    if graph is not None:
        graph.will_write(tensor.values for tensor in tensors)


def _launched(function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], found: Any) -> None:
    """Count a launch, unless the operation is a view or an allocation, and have a captured graph repeat it."""
    current = state()
    if current.capture is not None:
        current.capture.add(function, args, kwargs, found)
    if current.counts and not is_uncounted():
        size = sum(size for size, _ in moved(function, args, kwargs, found))
        if size:
            current.count("launches", name)
            current.count("bytes_moved", name, size)


def _collective(
    function: Any, name: str, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    check_for_nccl(name, tensors)
    given = with_tensors(values_of, (args, kwargs))
    wrappers = {id(tensor.values): tensor for tensor in tensors if isinstance(tensor, DeviceTensor)}
    found = function(*given[0], **given[1])
    if function.namespace == "c10d":  # returns what it was given
        return with_tensors(lambda tensor: wrappers.get(id(tensor), tensor), found)
    return with_tensors(DeviceTensor, found) if wrappers else found


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return left.to(dtype) @ right.to(dtype)


def _on_cpu() -> dict[Any, Callable[..., Any]]:
    """What torch has on CUDA only."""
    return {aten.mm.dtype: _product} if hasattr(aten.mm, "dtype") else {}


_ON_CPU = _on_cpu()
DeviceTensor.run = staticmethod(run)
