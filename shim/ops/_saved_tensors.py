"""What a node of autograd's graph has saved for backward, and which hooks it has.

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

__all__ = ["HOOKED", "Saved", "foreign_hooks_active", "now", "saved_by"]

HOOKED = "hooks of somebody else, who offloads or recomputes it, have it already"
REFUSED = "autograd does not give it out: it was changed in place, or its graph is done with"
CLEARED = "it is to be read but once (clear_saved_tensors_on_access)"

PREFIX = "_raw_saved_"
PYTHON_NAMES = {"_raw_saved_tensors": "saved_tensors"}


class Saved(NamedTuple):
    """One tensor that a node has saved: where autograd keeps it, and the tensor, or why it is not to be had.

    name: of the argument or the result that it is, where the node is torch's own.
    """

    name: str
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


def saved_by(node: Any) -> Iterator[Saved]:
    """What a node has saved, without having anything recomputed or fetched for it."""
    kind = type(node)
    names = PYTHON_NAMES if isinstance(node, BackwardCFunction) else _names(cast(Hashable, kind))
    for raw_name, attribute in names.items():
        name = attribute.removeprefix("_saved_")
        try:
            raw = getattr(node, raw_name)
        except RuntimeError:  # the graph is done with
            continue
        slots = raw if isinstance(raw, tuple) else (raw,)
        reason = _reason_not_to_look(node, slots)
        if not reason:
            try:
                tensors = getattr(node, attribute)
            except RuntimeError:
                reason = REFUSED
        if reason:
            yield from (Saved(name, slot, None, reason) for slot in slots)
            continue
        pairs = zip(slots, tensors if isinstance(raw, tuple) else (tensors,), strict=True)
        yield from (Saved(name, slot, tensor) for slot, tensor in pairs if isinstance(tensor, Tensor))


def _reason_not_to_look(node: Any, slots: Iterable[Any]) -> str:
    if any(getattr(slot, "unpack_hook", None) is not None for slot in slots):
        return HOOKED  # to look at what a checkpoint has would run it again
    if getattr(getattr(node, "_forward_cls", None), "clear_saved_tensors_on_access", False):
        return CLEARED
    return ""


@cache
def _names(kind: Hashable) -> dict[str, str]:
    """For a kind of node in C++: the attribute of each SavedTensor, and that of its tensor."""
    return {name: "_saved_" + name.removeprefix(PREFIX) for name in dir(kind) if name.startswith(PREFIX)}
