"""Regions that torch.compile has compiled from functions whose effect on rows is known."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from shim._torch_names import COMPILED_BY
from shim.ops._checks import capturing

__all__ = ["CompiledRegions", "is_compiled"]

# The node type of each compiled graph -> function -> whether the function makes such a node.
_MADE_BY: weakref.WeakKeyDictionary[Any, dict[Callable[..., Any], bool]] = weakref.WeakKeyDictionary()


class CompiledRegions:
    """Recognises the nodes of `functions`: compiled, elementwise functions of one tensor that work on rows of zeros.

    A node does not name its source. But if a function made the node, a call of the function with the node's saved
    tensor makes another node of the same type. Each type is tested once, and never while a CUDA graph is captured,
    which would record the call.
    """

    def __init__(self, functions: Collection[Callable[..., Any]] = ()) -> None:
        self._functions = functions

    def have(self, node: Any) -> bool:
        return is_compiled(node) and any(_has_made(one, node) for one in self._functions)


def is_compiled(node: Any) -> bool:
    return (getattr(getattr(node, "_forward_cls", None), "__module__", None) or "").startswith(COMPILED_BY)


def _has_made(function: Callable[..., Any], node: Any) -> bool:
    known = _MADE_BY.setdefault(node._forward_cls, {})
    if function not in known:
        if capturing() or len(node.next_functions) != 1 or len(node._input_metadata) != 1:
            return False
        saved = _like_input_of(node)
        if saved is None:
            return False
        made = function(saved.detach().requires_grad_()).grad_fn
        known[function] = getattr(made, "_forward_cls", None) is node._forward_cls
    return known[function]


def _like_input_of(node: Any) -> Tensor | None:
    """A saved tensor with the dtype and shape of the node's input, preferably the input itself."""
    (edge, number), made = node.next_functions[0], node._input_metadata[0]
    try:
        saved = node.saved_tensors
    except RuntimeError:  # the graph was freed, or the tensor was changed in place
        return None
    found = [one for one in saved if one is not None and one.dtype == made.dtype]
    found = [one for one in found if tuple(one.shape) == tuple(made.shape)]
    itself = (one for one in found if one.grad_fn is not None and (one.grad_fn, one.output_nr) == (edge, number))
    return next(itself, found[0] if found else None)
