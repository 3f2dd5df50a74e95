"""For the linear form: a low-rank term of the logits, the largest logits, and the gradient of a weight.

That gradient is made a part of its rows at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Largest", "LowRank", "WeightGradient", "add_product"]


class LowRank(NamedTuple):
    """A second product of the logits, ``hidden @ weight.T``, such as that of an adapter (LoRA).

    hidden: [..., r], the leading dimensions are those of the first product. weight: [V / ranks, r]. Both get a gradient
    if they require one. weight_grad, sum_hidden_grad: see linear_token_logprobs.
    """

    hidden: Tensor
    weight: Tensor
    weight_grad: Tensor | None = None
    sum_hidden_grad: bool = True


class Largest(NamedTuple):
    """Where the linear form is to write the largest logit of each token in this rank's share, without a gradient.

    value: [...] in fp32, or fp64, before the temperature. column: int64 [...], within the share, the first of equal
    ones. Both are 0 for ignored tokens.
    """

    value: Tensor
    column: Tensor

    @classmethod
    def like(cls, target: Tensor, dtype: torch.dtype = torch.float32) -> Largest:
        """For targets of this shape."""
        return cls(torch.empty_like(target, dtype=dtype), torch.empty_like(target, dtype=torch.int64))


class WeightGradient:
    """The gradient of a weight [V, H] from tiles of tokens. V is the outer loop, so one part is summed at a time.

    into: [V, H] in any dtype, to which the gradient is added, instead of a `result`. Each of its entries is rounded
    once, or in each sum if it has the dtype of the sums.
    direct: whether a product can be written into the result, as one tile has all tokens, or nothing is rounded.
    """

    def __init__(self, weight: Tensor, into: Tensor | None, columns: int, dtype: torch.dtype, direct: bool) -> None:
        self.into, self.result = into, torch.empty_like(weight) if into is None else None
        self.exact = into is not None and weight.dtype != dtype
        apart = into.dtype != dtype if into is not None else not direct
        self._sums = weight.new_empty((columns, weight.size(1)), dtype=dtype) if apart else None

    def begin(self, columns: slice) -> None:
        whole = self.into if self.into is not None else self.result
        assert whole is not None
        self._place = whole[columns]
        self._part = self._place if self._sums is None else self._sums[: self._place.size(0)]
        self._begun = self._part is self._place and self.into is not None

    def add(self, of_logits: Tensor, hidden: Tensor) -> None:
        """The product of the gradient of logits [n, columns] and hidden [n, H]."""
        add_product(self._part, of_logits.t(), hidden, self._begun, self.exact)
        self._begun = True

    def end(self) -> None:
        if not self._begun:
            self._part.zero_()
        if self._part is self._place:
            return
        if self.into is None:
            self._place.copy_(self._part)
        else:
            self._place.add_(self._part)


def add_product(to: Tensor, left: Tensor, right: Tensor, begun: bool, exact: bool = False) -> None:
    """to += left @ right, or to = left @ right before the first sum. `to` may have a higher precision.

    exact: then the product is not rounded to the dtype of its factors.
    """
    if to.dtype != left.dtype:
        product = _unrounded(left, right, to.dtype) if exact else left @ right
        to.add_(product) if begun else to.copy_(product)
    elif begun:
        to.addmm_(left, right)
    else:
        torch.mm(left, right, out=to)


def _unrounded(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    if left.is_cuda and dtype == torch.float32 and hasattr(torch.ops.aten.mm, "dtype"):  # torch 2.8, on CUDA only
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)
