"""Storages whose values are replaced without an operation on their tensors."""

from __future__ import annotations

from torch import Tensor

__all__ = ["copy_storage"]


def copy_storage(target: Tensor, source: Tensor) -> None:
    """Give the storage of `target` the size and the bytes of that of `source`; both keep their own memory.

    No operation on a tensor does it, which autograd would take for a change of `target`.
    """
    target.untyped_storage().resize_(source.untyped_storage().size())
    target.untyped_storage().copy_(source.untyped_storage())
