"""Moves of whole elements along the first dimension, whose gradient is the move back: nothing is added up."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from shim.ops.roll import Mask

__all__ = ["Places", "Runs", "moved", "once"]

Value = TypeVar("Value")

# Elements that follow each other: the number of the first, from 0, or None without a source, and how many there are.
Runs = list[tuple[int | None, int]]


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
    runs: the same for the host, if it knows them and they are few: it copies a few runs faster than it makes an index.
    """

    def __init__(self, numbers: Tensor | None, complete: bool = False, runs: Runs | None = None, size: int = 0) -> None:
        self._given = numbers
        self.complete = complete
        self.runs = runs
        self._size = size  # of the input, if there are runs

    @once
    def numbers(self) -> Tensor:
        if self._given is not None:
            return self._given
        assert self.runs is not None
        return self._joined(torch.arange(1, self._size + 1, dtype=torch.int32), 0)

    def __len__(self) -> int:
        return self.numbers.numel() if self.runs is None else sum(n for _, n in self.runs)

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
        if self.runs is not None:
            return Places(None, self.complete, *_turned(self.runs, size))
        numbers = torch.arange(1, self.numbers.numel() + 1, dtype=torch.int32, device=self.numbers.device)
        # Elements without a source meet in element 0, which is dropped.
        back = torch.zeros(size + 1, dtype=torch.int32, device=numbers.device)
        return Places(back.scatter_(0, self.numbers.long(), numbers)[1:])

    def at(self, picked: Places) -> Places:
        """The sources of those elements of the result that `picked`, which is complete, takes."""
        if self.runs is None or picked.runs is None:
            return Places(self.numbers.index_select(0, picked.index))
        return Places(None, False, _cut(self.runs, picked.runs), self._size)

    @once
    def _pieces(self) -> tuple[list[int], list[int], list[int]]:
        """The sizes that cut the input into runs and what lies between them, those of runs without a source, and which
        of all these pieces follow each other in the result."""
        assert self.runs is not None
        sizes, blanks, place, end = [], [n for start, n in self.runs if start is None], {}, 0
        for start, n in sorted((start, n) for start, n in self.runs if start is not None):
            sizes += [start - end] * (start > end)
            place[start] = len(sizes)
            sizes.append(n)
            end = start + n
        sizes += [self._size - end] * (self._size > end)
        blank = itertools.count(len(sizes))
        return sizes, blanks, [next(blank) if start is None else place[start] for start, _ in self.runs]

    def _joined(self, tensor: Tensor, fill: Any) -> Tensor:
        """Runs of `tensor` [size, ...] one after another, `fill` without a source. Differentiable."""
        sizes, blanks, order = self._pieces
        blank = tensor.new_full((sum(blanks), *tensor.shape[1:]), fill)
        pieces = (*tensor.split(sizes), *blank.split(blanks))
        if tensor.requires_grad and len(order) == len(blanks):  # backward has to run: other ranks wait for its messages
            return torch.cat([tensor[:0], blank])
        return torch.cat([pieces[place] for place in order]) if order else blank

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None]:
        """(index, there); there is None if complete."""
        return self.index, None if self.complete else self.there

    def pick(self, tensor: Tensor, fill: Any = 0) -> Tensor:
        """[size, ...] -> [n, ...], `fill` without a source; any dtype; a new tensor."""
        if self.runs is not None:
            return self._joined(tensor, fill)
        # A tuple, because torch.compile traces no union before torch 2.12.
        zero = isinstance(fill, (int, float)) and fill == 0
        if self.complete or not zero or tensor.size(0) == 0:
            return _picked(tensor, *self.tensors, fill)
        return self._mask.clear_(tensor.index_select(0, self.index), 0)


def _turned(runs: Runs, size: int) -> tuple[Runs, int]:
    """The runs of the way back to an input of `size` elements, and how many elements these runs have."""
    found, at = [], 0
    for start, n in runs:
        if start is not None:
            found.append((start, at, n))
        at += n
    back: Runs = []
    end = 0
    for start, place, n in sorted(found):
        back += [(None, start - end)] * (start > end) + [(place, n)]
        end = start + n
    return back + [(None, size - end)] * (size > end), at


def _cut(runs: Runs, picked: Runs) -> Runs:
    """The parts of `runs` that `picked` takes, in its order."""
    begins = list(itertools.accumulate((n for _, n in runs), initial=0))
    found: Runs = []
    for first, length in picked:
        assert first is not None
        at = bisect_right(begins, first) - 1
        while length > 0:
            start = runs[at][0]
            n = min(length, begins[at + 1] - first)
            found.append((None if start is None else start + first - begins[at], n))
            first, length, at = first + n, length - n, at + 1
    return found


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
    if there.runs is not None or not (tensor.requires_grad and torch.is_grad_enabled()):
        return there.pick(tensor, fill)
    result: Tensor = _Move.apply(tensor, fill, *there.tensors, *back().tensors)
    return result
