"""Which tensors a node of autograd's graph has saved for backward, and which hooks they have.

Default hooks on saved tensors would be simpler, but they touch every saved tensor. A parameter that passes through a
hook comes back to backward as another object, without the attributes that gradient accumulation needs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import disable_saved_tensors_hooks

from shim._torch_names import required

__all__ = ["HOOKED", "Saved", "foreign_hooks_active", "now", "saved_by"]

HOOKED = "foreign hooks, which offload or recompute it, already have it"
REFUSED = "autograd does not give it out: it was changed in place, or its graph is done with"
CLEARED = "it may be read only once (clear_saved_tensors_on_access)"

PREFIX = "_raw_saved_"
PYTHON_NAMES = {"_raw_saved_tensors": "saved_tensors"}


class Saved(NamedTuple):
    """One saved tensor of a node: autograd's slot, and the tensor or the reason why it cannot be read.

    name: the operator's argument or result that it is, if the node is torch's own.
    """

    name: str
    slot: Any  # torch's SavedTensor
    tensor: Tensor | None
    reason: str = ""


def now() -> int:
    """The number of the next node in this thread's autograd graph."""
    number: int = required("torch:_C._autograd._get_sequence_nr")()
    return number


def foreign_hooks_active() -> bool:
    """Whether foreign default hooks on saved tensors are active: offloading, or torch's checkpoint."""
    try:
        with disable_saved_tensors_hooks("shim looks for hooks"):  # refused if there are any
            return False
    except RuntimeError:
        return True


def saved_by(node: Any) -> Iterator[Saved]:
    """The tensors that a node has saved. Triggers no recompute and no fetch."""
    kind = type(node)
    names = PYTHON_NAMES if isinstance(node, BackwardCFunction) else _names(cast(Hashable, kind))
    for raw_name, attribute in names.items():
        name = attribute.removeprefix("_saved_")
        try:
            raw = getattr(node, raw_name)
        except RuntimeError:  # the graph was freed
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
        return HOOKED  # a read would make a checkpoint recompute
    if getattr(getattr(node, "_forward_cls", None), "clear_saved_tensors_on_access", False):
        return CLEARED
    return ""


@cache
def _names(kind: Hashable) -> dict[str, str]:
    """For a C++ node type: the attribute of each SavedTensor -> the attribute of its tensor."""
    return {name: "_saved_" + name.removeprefix(PREFIX) for name in dir(kind) if name.startswith(PREFIX)}
