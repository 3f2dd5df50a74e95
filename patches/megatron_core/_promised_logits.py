"""Logits that nobody has computed yet, for fused-linear-logprob."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shim import ops
from shim._errors import ShimError
from shim._torch_names import required
from shim.patches.megatron_core._linear_losses import Head, losses_of

__all__ = ["Promise"]

ID = "fused-linear-logprob"


class Term(NamedTuple):
    """A product of the logits: what a head makes, times a factor."""

    head: Head
    factor: float


class Promise:
    """The logits of one call of an output layer, [s, b, V / TP]: a sum of terms, times a scale.

    There is one term, or, with an adapter (LoRA), a second one of low rank. Multiplying by a number and adding up give
    another promise. Anything else gets the logits themselves.

    predicts: then the losses find the largest logit of each token too. Whoever asks for it afterwards, by max(dim=-1)
    or torch.argmax, gets it from there.
    """

    def __init__(self, terms: tuple[Term, ...], scale: float = 1.0, predicts: bool = False) -> None:
        self.terms, self.scale, self.with_grad = terms, scale, torch.is_grad_enabled()
        self.predicts = predicts
        self._largest: ops.Largest | None = None

    @classmethod
    def of(cls, head: Head, predicts: bool = False) -> Promise:
        return cls((Term(head, 1.0),), predicts=predicts)

    @property
    def shape(self) -> torch.Size:
        return self.terms[0].head.shape

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def reshape(self, *shape: Any) -> Any:
        wanted = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self if wanted == tuple(self.shape) else self.kept.reshape(*shape)

    def __mul__(self, factor: Any) -> Any:
        if isinstance(factor, (int, float)) and factor > 0:  # muP's multiplier, or the scale of an adapter
            return Promise(self.terms, self.scale * factor, self.predicts)
        return self.kept * factor

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Promise) and self._joins(other):
            both = [term._replace(factor=term.factor * each.scale) for each in (self, other) for term in each.terms]
            return Promise(tuple(both), predicts=self.predicts)
        return self.kept + _given(other)

    def __radd__(self, other: Any) -> Any:
        return _given(other) + self.kept

    def _joins(self, other: Promise) -> bool:
        (first, *more), (second, *others) = self.terms, other.terms
        one, two = first.head, second.head
        alike = one.shape == two.shape and one.hidden.dtype == two.hidden.dtype and one.group is two.group
        return alike and not more and not others and self.with_grad == other.with_grad

    def losses(self, labels: Tensor, skip: bool) -> Tensor:
        """The loss of each token, [b, s] in fp32, for labels [b, s]. skip: see losses_of."""
        scaled = [(term.head, term.factor * self.scale) for term in self.terms]
        losses, self._largest = losses_of(scaled, labels, skip, self.predicts)
        return losses

    def max(self, *args: Any, **kwargs: Any) -> Any:
        if self._largest is None or not _along_the_last(*args, **kwargs):
            return self.kept.max(*args, **kwargs)
        return torch.return_types.max(self._largest)

    @functools.cached_property
    def kept(self) -> Tensor:
        """The logits themselves."""
        if torch.is_grad_enabled() != self.with_grad:
            # Such as inside of an autograd function, which would lose their gradient.
            raise ShimError(
                f"{ID}: something other than the model's loss takes the logits, and not where they are made. Leave the "
                "option `fuse` off for this model"
            )
        found: Tensor | None = None
        for term in self.terms:
            of_term = _times(term.head.logits(), term.factor)
            found = of_term if found is None else found + of_term
        assert found is not None
        return _times(found, self.scale)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kept, name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.argmax and isinstance(args[0], Promise) and _along_the_last(*args[1:], **kwargs):
            largest = args[0]._largest
            if largest is not None:
                return largest.column
        args, kwargs = required("torch.utils._pytree:tree_map")(_given, (args, kwargs))
        return function(*args, **kwargs)


def _along_the_last(dim: Any = None, keepdim: Any = False) -> bool:
    return isinstance(dim, int) and dim in (-1, 2) and not keepdim


def _times(logits: Tensor, factor: float) -> Tensor:
    return logits if factor == 1.0 else logits * factor


def _of_logits(name: str) -> Any:
    def operator(self: Promise, *args: Any) -> Any:
        return getattr(self.kept, name)(*args)

    return operator


_BINARY = ("sub", "truediv", "pow", "matmul")
_OTHERS = ("neg", "abs", "len", "getitem", "iter", "lt", "le", "gt", "ge")
# Python looks operators up on the class.
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS):
    setattr(Promise, f"__{_name}__", _of_logits(f"__{_name}__"))


def _given(value: Any) -> Any:
    return value.kept if isinstance(value, Promise) else value
