"""The bytes that an operation moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .trees import tensors_in

__all__ = ["moved"]

_OVERWRITING = (
    "copy_",
    "index_copy_",
    "zero_",
    "fill_",
    "normal_",
    "uniform_",
    "random_",
    "exponential_",
)  # written, but not read
# Of their first tensor they touch the picked entries only.
_INDEXING = (
    "gather",
    "index",
    "index_copy_",
    "index_select",
    "scatter_",
    "scatter_add_",
    "index_put_",
    "_index_put_impl_",
)


def moved(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[tuple[int, int]]:
    """(bytes, size of the storage) of each tensor that an operation reads or writes, twice if both; [] of a view.

    All of a tensor counts each time it is an argument or a result, but of a tensor that is indexed only the entries
    that are picked. Views, allocations and collectives move nothing.
    """
    schema, name = function._schema, function.overloadpacket.__name__
    given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
    touched = [tensor for tensor in tensors_in(result) if tensor.untyped_storage()._cdata not in given]
    if name.startswith(("empty", "new_empty")) or function.namespace == "c10d" or not (touched or schema.is_mutable):
        return []
    # Of a factory such as zeros_like, the argument only says what the result looks like.
    shaped_alike = name.startswith("new_") or name.endswith("_like")
    for place, argument in enumerate(() if shaped_alike else schema.arguments):
        tensors = tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written:
            touched += tensors
        if not argument.is_out and not (written and name in _OVERWRITING):
            touched += tensors
    most = None
    if name in _INDEXING:
        most = max((tensor.numel() for tensor in touched if tensor is not args[0]), default=0)
    return [_touched(tensor, most) for tensor in touched]


def _touched(tensor: Tensor, most: int | None) -> tuple[int, int]:
    entries = tensor.numel() if most is None else min(tensor.numel(), most)
    size = tensor.untyped_storage().nbytes()
    # An expanded tensor has fewer entries than it shows.
    return min(entries * tensor.itemsize, size), size
