"""The pretended device of this process: there is one or none, because torch.cuda is the same for all threads."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from .counts import Counts, Event, current_place, is_uncounted

if TYPE_CHECKING:
    from .graphs import Graph

__all__ = ["CaptureError", "DeviceFaultError", "State", "state"]


class DeviceFaultError(RuntimeError):
    """What a GPU refuses: tensors on two devices, a kernel that reads memory of the host, a device-side assertion."""


class CaptureError(DeviceFaultError):
    """What is not permitted while a stream is captured into a graph."""


class State:
    """What counts at present, the graph that is captured, and which memory of the host is pinned."""

    def __init__(self) -> None:
        self.counts: list[Counts] = []
        self.capture: Graph | None = None
        self.streams = threading.local()
        self._pinned: set[int] = set()

    # What happens

    def count(self, name: str, what: str, number: int = 1) -> None:
        """Add to the counter `name` of all that count at present."""
        if self.counts and not is_uncounted():
            event = Event(what, current_place())
            for counts in self.counts:
                getattr(counts, name)[event] += number
                counts.threads.add(threading.current_thread().name)

    def host_waits(self, what: str) -> None:
        """Something for which the host waits for the device."""
        self.not_while_capturing(what)
        self.count("host_reads", what)

    def blocking_copy(self, what: str) -> None:
        self.not_while_capturing(what)
        self.count("blocking_copies", what)

    def fault(self, what: str) -> DeviceFaultError:
        """The error to raise, after it has been counted."""
        self.count("faults", what)
        return DeviceFaultError(f"pretended CUDA: {what} at {current_place()}")

    def not_while_capturing(self, what: str) -> None:
        if self.capture is not None and not is_uncounted():
            self.count("faults", f"{what} while capturing")
            place = current_place()
            raise CaptureError(f"pretended CUDA: {what} is not permitted while a stream is capturing, at {place}")

    # Pinned memory

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that this memory of the host is pinned, until it is freed."""
        self.not_while_capturing("an allocation of pinned memory")
        storage = tensor.untyped_storage()
        self._pinned.add(storage._cdata)
        weakref.finalize(storage, self._pinned.discard, storage._cdata)
        return tensor

    def is_pinned(self, tensor: Any) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned


_STATE: list[State] = []


def state() -> State:
    """That of the pretended device; an idle one if tensors have outlived it."""
    return _STATE[-1] if _STATE else State()
