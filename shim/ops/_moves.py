"""Moves of whole elements along the first dimension, whose gradient is the move back: nothing is added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from shim.ops.roll import Mask

__all__ = ["Places", "moved", "once"]

Value = TypeVar("Value")


class once(Generic[Value]):
    """A property that is computed at its first read. That of functools has a lock, which torch.compile cannot enter."""

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self.compute = compute
        self.name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> once[Value]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...
    def __get__(self, instance: object | None, owner: type) -> once[Value] | Value:
        if instance is None:
            return self
        value = self.compute(instance)
        object.__setattr__(instance, self.name, value)  # also of a frozen dataclass
        return value


class Places:
    """The source of each of n elements of a result.

    numbers: int32 [n], the number of an element of the input, counted from 1; 0 without a source.
    complete: whether no number is 0.
    """

    def __init__(self, numbers: Tensor, complete: bool = False) -> None:
        self.numbers = numbers
        self.complete = complete

    @once
    def index(self) -> Tensor:
        """The same counted from 0: int32 [n], in range also without a source."""
        index = self.numbers - 1
        return index if self.complete else index.clamp_(min=0)

    @once
    def there(self) -> Tensor:
        """bool [n], False without a source."""
        return self.numbers > 0

    @once
    def _mask(self) -> Mask:
        return Mask(self.there.to(torch.int8).neg_())

    def inverse(self, size: int) -> Places:
        """The way back to an input of `size` elements, of which none goes to two places."""
        numbers = torch.arange(1, self.numbers.numel() + 1, dtype=torch.int32, device=self.numbers.device)
        # Elements without a source meet in element 0, which is dropped.
        back = torch.zeros(size + 1, dtype=torch.int32, device=numbers.device)
        return Places(back.scatter_(0, self.numbers.long(), numbers)[1:])

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None]:
        """(index, there); there is None if complete."""
        return self.index, None if self.complete else self.there

    def pick(self, tensor: Tensor, fill: Any = 0) -> Tensor:
        """[size, ...] -> [n, ...], `fill` without a source; any dtype; a new tensor."""
        # A tuple, because torch.compile traces no union before torch 2.12.
        zero = isinstance(fill, (int, float)) and fill == 0
        if self.complete or not zero or tensor.size(0) == 0:
            return _picked(tensor, *self.tensors, fill)
        return self._mask.clear_(tensor.index_select(0, self.index), 0)


def _picked(tensor: Tensor, index: Tensor, there: Tensor | None, fill: Any) -> Tensor:
    if tensor.size(0) == 0:
        return tensor.new_full((index.numel(), *tensor.shape[1:]), fill)
    picked = tensor.index_select(0, index)
    if there is None:
        return picked
    nothing = ~there.view(-1, *[1] * (tensor.dim() - 1))
    if tensor.dtype.is_floating_point and tensor.element_size() == 1:  # these dtypes have no masked_fill
        bits = torch.full((), fill).to(tensor.dtype).view(torch.int8)
        return picked.view(torch.int8).masked_fill_(nothing, bits).view(tensor.dtype)
    return picked.masked_fill_(nothing, fill)


class _Move(torch.autograd.Function):
    """Takes plain tensors and keeps nothing outside of them, as torch.compile asks of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, fill: Any, *ways: Tensor | None) -> Tensor:
        index, there, *_ = ways
        assert index is not None
        ctx.save_for_backward(*ways)
        return _picked(tensor, index, there, fill)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        index, there, back, there_back = ctx.saved_tensors
        return _Move.apply(grad, 0, back, there_back, index, there), None, None, None, None, None


def moved(tensor: Tensor, there: Places, back: Callable[[], Places], fill: Any = 0) -> Tensor:
    """Elements of `tensor` [size, ...] in the places of `there`; `back` gives the way back for a gradient."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return there.pick(tensor, fill)
    result: Tensor = _Move.apply(tensor, fill, *there.tensors, *back().tensors)
    return result
