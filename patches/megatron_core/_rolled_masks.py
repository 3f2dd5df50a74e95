"""Loss masks that were rolled before the step that rolls them, for mtp-loss-cp.

The loss masks of all depths of multi-token prediction are rolled at once, so that one message can count the targets of
all of them. When upstream then rolls a mask, it gets the one that is there already, with the count. The roll of
mtp-packed-sequences asks here too, because it calls no other up to 0.15.

`THREAD.masks` is ambient, because upstream's roll is not told which step it belongs to. It belongs to the thread and
ends with the step.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from shim.patches._named import Named

__all__ = ["THREAD", "RolledMasks", "handed_out"]


class RolledMasks:
    """The rolls of one step: a context manager in which `handed_out` finds them.

    A class, because torch.compile with fullgraph=True does not accept a generator here.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rolls: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, mask: Tensor, rolled: Tensor, count: Tensor) -> None:
        """The roll of `mask` is to return `rolled`, both [b, s], and `count`, [], instead of the sum of `rolled`."""
        self.rolls.append((mask, rolled, count))

    def __enter__(self) -> RolledMasks:
        self.outer = THREAD.masks
        THREAD.masks = self
        return self

    def __exit__(self, *exception: object) -> None:
        THREAD.masks = self.outer


class _Thread(Named, threading.local):
    """The rolls of the step that this thread is in."""

    masks: RolledMasks | None = None


THREAD = _Thread()


def handed_out(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """What the roll of this very tensor returns, if it was rolled before; None for any other tensor."""
    if THREAD.masks is not None:
        for mask, rolled, count in THREAD.masks.rolls:
            if mask is tensor:
                return rolled, count
    return None
