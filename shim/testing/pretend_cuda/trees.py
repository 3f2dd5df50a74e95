"""Tensors in the arguments of an operation: in lists, tuples and dictionaries. Faster than torch's pytree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["tensors_in", "with_tensors"]


def tensors_in(tree: Any, found: list[Tensor] | None = None) -> list[Tensor]:
    """All tensors, in order."""
    found = [] if found is None else found
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            tensors_in(value, found)
    elif isinstance(tree, dict):
        for value in tree.values():
            tensors_in(value, found)
    return found


def with_tensors(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same, with change(tensor) in the place of each tensor."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)([with_tensors(change, value) for value in tree])
    if isinstance(tree, dict):
        return {name: with_tensors(change, value) for name, value in tree.items()}
    return tree
