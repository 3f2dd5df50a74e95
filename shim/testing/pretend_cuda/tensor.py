"""Tensors whose values lie on the CPU, and whose device says cuda:0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from shim._torch_names import required

__all__ = ["DEVICE", "DeviceTensor", "values_of"]

DEVICE = torch.device("cuda", 0)
_DATA: Any = torch.Tensor.data
_TYPES = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.bool: "Bool",
}


class DeviceTensor(torch.Tensor):
    """A tensor on the pretended device; `values` is the CPU tensor that has its values.

    For torch's C++ its device is meta, so autograd works as without a GPU, in any process. For Python it is cuda:0.
    """

    values: Tensor  # type: ignore[assignment]
    on_host = False  # whether other code has put memory of the host into it, by `tensor.data = tensor.data.cpu()`
    run: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]  # what runs operations: see operations.run
    __torch_function__ = required("torch:_C._disabled_torch_function_impl")

    @staticmethod
    def __new__(cls, values: Tensor, requires_grad: bool = False) -> DeviceTensor:
        made = required("torch:Tensor._make_wrapper_subclass")(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=torch.device("meta"),
            requires_grad=requires_grad,
        )
        made.values = values
        return made

    def __init__(self, values: Tensor, requires_grad: bool = False) -> None: ...

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return cls.run(function, args, dict(kwargs or {}))

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.values.device if self.on_host else DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return not self.on_host

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.on_host

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    @property
    def data(self) -> Tensor:
        return self.values if self.on_host else _DATA.__get__(self)

    @data.setter
    def data(self, other: Tensor) -> None:
        self.on_host = not isinstance(other, DeviceTensor)
        held = DeviceTensor(other) if self.on_host else other
        _DATA.__set__(self, held)
        self.values = values_of(held)

    def get_device(self) -> int:
        return 0

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return f"torch.cuda.{_TYPES.get(self.dtype, 'Other')}Tensor"
        return self.to(dtype, non_blocking=non_blocking)

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.values.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def item(self) -> Any:
        return self.cpu().item()

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        return self.to("cpu", memory_format=memory_format)

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def record_stream(self, stream: Any) -> None:
        """Nothing: freed memory of the pretended device is not used again by another stream."""

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def pin_memory(self, device: Any = None) -> Tensor:
        raise RuntimeError(f"cannot pin 'torch.cuda.{self.dtype}' only dense CPU tensors can be pinned")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied = self.detach().clone()
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied)
            vars(copied).update({name: value for name, value in vars(self).items() if name != "values"})
            memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a tensor of the pretended device cannot be pickled: save its .cpu()")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.values!r}, device='cuda:0')"


def values_of(tensor: Any) -> Any:
    """The CPU tensor that has the values of a tensor of the pretended device; anything else as it is.

    Nothing is copied or counted: for what a test does itself, such as a comparison.
    """
    return tensor.values if isinstance(tensor, DeviceTensor) else tensor


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Inside, operations on values run as torch's own."""
    disabled = required("torch.utils._python_dispatch:_disable_current_modes")
    with disabled(), required("torch:_C.DisableTorchFunction")():
        yield
