"""What autograd has saved for backward since a point in time, found by walking the graph.

Default hooks on saved tensors would be simpler, but they touch every saved tensor, and a parameter that passes one
comes back to backward as another object, without the attributes that gradient accumulation looks for on it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

__all__ = ["HOOKED", "Saved", "foreign_hooks_active", "now", "saved_since"]

HOOKED = "hooks of somebody else, who offloads or recomputes it, have it already"
REFUSED = "autograd does not give it out: it was changed in place, or its graph is done with"
CLEARED = "it is to be read but once (clear_saved_tensors_on_access)"
SINGULAR = "its backward divides by it, and rows that are not valid come back as zeros"

PREFIX = "_raw_saved_"
PYTHON_NAMES = {"_raw_saved_tensors": "saved_tensors"}
# Nodes whose backward has a pole at zero.
POLES = (
    "Acosh",
    "Atan2",
    "Digamma",
    "Div",
    "LinalgVectorNorm",
    "Lgamma",
    "Log",
    "Norm",
    "Polygamma",
    "Pow",
    "Prod",
    "Sqrt",
)


class Saved(NamedTuple):
    """One tensor that a node has saved: where autograd keeps it, and the tensor, or why it is not to be had."""

    slot: Any  # torch's SavedTensor
    tensor: Tensor | None
    reason: str = ""


def now() -> int:
    """The number that the next node of this thread's autograd graph gets."""
    return torch._C._autograd._get_sequence_nr()


def foreign_hooks_active() -> bool:
    """Whether somebody else has hooks on everything that is saved here: offloading, or a checkpoint of torch."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(False) is not None


def saved_since(outputs: Iterable[Tensor], start: int, inputs: Iterable[Tensor] = ()) -> Iterator[Saved]:
    """What all nodes have saved that lead from `inputs` to `outputs` and were made from `start` on, in this thread.

    Without inputs, only their numbers tell nodes of another thread, which has its own, from those that are meant.
    """
    waiting: list[Any] = [output.grad_fn for output in outputs]
    seen = {tensor.grad_fn for tensor in inputs}
    while waiting:
        node = waiting.pop()
        # Leaves accumulate in nodes with the highest number of all; those have nothing saved and lead nowhere.
        if node is None or node in seen or node._sequence_nr() < start:
            continue
        seen.add(node)
        yield from _saved_by(node)
        waiting += [following for following, _ in node.next_functions]


def _saved_by(node: Any) -> Iterator[Saved]:
    kind = type(node)
    names = PYTHON_NAMES if isinstance(node, BackwardCFunction) else _names(cast(Hashable, kind))
    for raw_name, name in names.items():
        try:
            raw = getattr(node, raw_name)
        except RuntimeError:  # the graph is done with
            continue
        slots = raw if isinstance(raw, tuple) else (raw,)
        reason = _reason_not_to_look(node, slots)
        if not reason:
            try:
                tensors = getattr(node, name)
            except RuntimeError:
                reason = REFUSED
        if reason:
            yield from (Saved(slot, None, reason) for slot in slots)
            continue
        pairs = zip(slots, tensors if isinstance(raw, tuple) else (tensors,), strict=True)
        yield from (Saved(slot, tensor) for slot, tensor in pairs if isinstance(tensor, Tensor))


def _reason_not_to_look(node: Any, slots: Iterable[Any]) -> str:
    if any(getattr(slot, "unpack_hook", None) is not None for slot in slots):
        return HOOKED  # to look at what a checkpoint has would run it again
    if getattr(getattr(node, "_forward_cls", None), "clear_saved_tensors_on_access", False):
        return CLEARED
    return SINGULAR if type(node).__name__.startswith(POLES) else ""


@cache
def _names(kind: Hashable) -> dict[str, str]:
    """For a kind of node in C++: the attribute of each SavedTensor, and that of its tensor."""
    return {name: "_saved_" + name.removeprefix(PREFIX) for name in dir(kind) if name.startswith(PREFIX)}
