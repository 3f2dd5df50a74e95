"""One saved tensor of autograd, in pages."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from shim.ops._stash_eager import NOWHERE
from shim.ops._stash_pool import PagePool, bits_of
from shim.ops._stash_rows import ValidRows

__all__ = ["StashedTensor"]


class StashedTensor:
    """Owns its pages, and frees them however it is dropped.

    where: int64 [1], a flag for the place of the copy, part of the caller's tensor. expected: how many rows are
    probably valid. kept: whether the original is held until `settle`.
    """

    __slots__ = (
        "__weakref__",
        "_captured",
        "_expected",
        "_pages",
        "_version",
        "dtype",
        "original",
        "pool",
        "rows",
        "shape",
        "strides",
        "where",
    )

    def __init__(
        self, tensor: Tensor, rows: ValidRows, pool: PagePool, where: Tensor, *, expected: int, kept: bool
    ) -> None:
        self.pool, self.rows, self.where = pool, rows, where
        self.shape, self.strides, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        tensor = tensor.detach()  # an output references its node, which references this object
        self.original: Tensor | None = tensor if kept else None
        self._version = tensor._version
        flat = bits_of(tensor).reshape(rows.rows, pool.width)
        pages = torch.empty(-(-rows.rows // pool.page_size), dtype=torch.int64, device=tensor.device)
        self._expected = -(-expected // pool.page_size)
        self._pages: Tensor | None = None
        self._captured = pool.store(flat, rows, pages, where, expected=self._expected, kept=kept)
        self._pages = pages

    def settle(self, where: int) -> None:
        """Drop the original if the flag, now known to the host, says that a copy exists."""
        if where == NOWHERE:
            self.pool.outgrown = True
        else:
            self.original = None

    def restore(self) -> Tensor:
        """The tensor with its strides. Invalid rows are zeros, unless the original was kept.

        RuntimeError if the kept original was changed in place, as from autograd itself.
        """
        original = self.original  # another thread may drop it
        if original is not None:
            if original._version != self._version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a tensor of shape {tuple(self.shape)} that the paged stash kept, is at version "
                    f"{original._version}; expected version {self._version}"
                )
            return original
        if self._pages is None:
            raise RuntimeError("the pages of this tensor were given back already")
        out = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.where.device)
        flat = bits_of(out)
        rows = flat.reshape(self.rows.rows, self.pool.width)
        self.pool.load(rows, self.rows, self._pages, self.where)
        if rows.data_ptr() != flat.data_ptr():  # reshape had to copy, because the strides allow no such view
            flat.copy_(rows.view(flat.shape))
        return out

    def release(self) -> None:
        """Give the pages back. Further calls do nothing."""
        pages, self._pages = self._pages, None
        if pages is not None:
            self.original = None
            self.pool.give_back(self.rows, pages, self.where, self._expected, self._captured)

    def __del__(self) -> None:
        # getattr, because __init__ may have failed early. At the end of the process the pool may be gone.
        if getattr(self, "_pages", None) is not None and not sys.is_finalizing():
            self.release()
