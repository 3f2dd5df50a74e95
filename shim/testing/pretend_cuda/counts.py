"""What a step asks of a device, counted by place."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import NamedTuple

__all__ = ["Counts", "Event", "current_place", "uncounted"]

_LEFT_OUT = {"torch", "triton"}  # top-level packages
_PYTHON = os.path.dirname(os.__file__)
_INSTALLED = ("site-packages", "dist-packages")


class Event(NamedTuple):
    """An event and its place: the innermost line that is not of torch, Triton or Python, or "" if there is none.

    Operations that autograd runs in C++ have no line.
    """

    what: str
    place: str

    def __str__(self) -> str:
        return f"{self.what} at {self.place or 'an operation of autograd'}"


class Counts:
    """The events of one rank, each a Counter by `Event`.

    faults: what a GPU refuses. A fault also raises an error, so it is seen here only if that was caught.
    refused_by_nccl: tensors in collectives that NCCL does not take: of the CPU, of a dtype that it lacks, or with gaps.
    host_reads: what makes the host wait for the device: values, sizes that depend on values, synchronizations.
    blocking_copies: copies from host to device for which the host waits.
    asynchronous_copies: copies in either direction for which it does not.
    launches: operations and Triton kernels that read or write memory of the device.
    bytes_moved: what the launches read and write, by place.
    collectives: operations of torch.distributed.
    threads: names of the threads in which operations ran.
    """

    def __init__(self) -> None:
        self.faults: Counter[Event] = Counter()
        self.refused_by_nccl: Counter[Event] = Counter()
        self.host_reads: Counter[Event] = Counter()
        self.blocking_copies: Counter[Event] = Counter()
        self.asynchronous_copies: Counter[Event] = Counter()
        self.launches: Counter[Event] = Counter()
        self.bytes_moved: Counter[Event] = Counter()
        self.collectives: Counter[Event] = Counter()
        self.threads: set[str] = set()

    def totals(self) -> dict[str, int]:
        """The sums, by name."""
        return {name: count.total() for name, count in self._counters().items()}

    def beyond(self, other: Counts) -> dict[str, int]:
        """What there is more of than in `other`, by name; {} if nothing."""
        theirs = other.totals()
        return {name: total - theirs[name] for name, total in self.totals().items() if total > theirs[name]}

    def told(self, name: str, other: Counts | None = None) -> str:
        """The events of one counter, most frequent first; those beyond `other` only, if it is given."""
        mine: Counter[Event] = getattr(self, name)
        shown = mine - getattr(other, name) if other is not None else mine
        return "\n".join(f"{count:>8} {event}" for event, count in shown.most_common())

    def __str__(self) -> str:
        return ", ".join(f"{name} {total:,}" for name, total in self.totals().items())

    def _counters(self) -> Mapping[str, Counter[Event]]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Counter)}


_ASIDE = threading.local()


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """What this thread does inside is not counted: what a test does itself, such as a comparison of results."""
    before = is_uncounted()
    _ASIDE.on = True
    try:
        yield
    finally:
        _ASIDE.on = before


def is_uncounted() -> bool:
    return getattr(_ASIDE, "on", False)


_FILES: dict[CodeType, str] = {}  # code -> its file as it is shown, "" if its lines are no places


def current_place() -> str:
    """The innermost line that is not of torch, Triton, Python or this package: "megatron/core/utils.py:12"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        file = _FILES.get(code)
        if file is None:
            file = _FILES[code] = _shown(code.co_filename, frame.f_globals.get("__name__", ""))
        if file:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _shown(path: str, module: str) -> str:
    of_python = path.startswith("<") or (path.startswith(_PYTHON) and not any(name in path for name in _INSTALLED))
    if of_python or module.partition(".")[0] in _LEFT_OUT or module.startswith(__package__):
        return ""
    name = module.replace(".", "/")
    return f"{name}/__init__.py" if os.path.basename(path) == "__init__.py" else f"{name}.py"
