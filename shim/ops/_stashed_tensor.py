"""One tensor that autograd has saved, in pages."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from shim.ops._stash_eager import NOWHERE
from shim.ops._stash_pool import PagePool, bits_of
from shim.ops._stash_rows import ValidRows

__all__ = ["StashedTensor"]


class StashedTensor:
    """Owns its pages and the flag that says whether it got any; both end with it, whoever drops it and however.

    where: int64 [1], the flag, a part of a tensor of the caller's. expected: how many rows are probably valid.
    kept: whether the original is held until `settle`.
    """

    __slots__ = (
        "__weakref__",
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
        tensor = tensor.detach()  # an output of a node would hold that node, and the node holds this
        self.original: Tensor | None = tensor if kept else None
        self._version = tensor._version
        flat = bits_of(tensor).reshape(rows.rows, pool.width)
        pages = torch.empty(-(-rows.rows // pool.page_size), dtype=torch.int64, device=tensor.device)
        self._expected = -(-expected // pool.page_size)
        self._pages: Tensor | None = None
        pool.store(flat, rows, pages, where, expected=self._expected, kept=kept)
        self._pages = pages

    def settle(self, where: int) -> None:
        """Drop the original, now that the host knows where its copy is, unless that is nowhere."""
        if where == NOWHERE:
            self.pool.outgrown = True
        else:
            self.original = None

    def restore(self) -> Tensor:
        """The tensor with its strides; rows that are not valid are zeros, unless it is the original.

        RuntimeError where the original was kept and has been changed in place, as autograd itself would say.
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
        if rows.data_ptr() != flat.data_ptr():  # the strides let no such view be made
            flat.copy_(rows.view(flat.shape))
        return out

    def release(self) -> None:
        """Give the pages back; once is enough, and more does nothing."""
        pages, self._pages = self._pages, None
        if pages is not None:
            self.original = None
            self.pool.give_back(self.rows.count, pages, self.where, self._expected)

    def __del__(self) -> None:
        # Also where __init__ did not get far. At the end of the process there is nobody left to give anything back to.
        if getattr(self, "_pages", None) is not None and not sys.is_finalizing():
            self.release()
