"""A buffer of pages for rows of one dtype and width, with its ring of free pages, all on the device."""

from __future__ import annotations

import threading
from collections import deque
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from shim._threads import renew_in_children
from shim.ops import _stash_eager
from shim.ops._checks import capturing, tracing
from shim.ops._stash_layout import BITS, HEAD, HOST_HEAD, HOST_TAIL, MOST_WANTED, STATES, TAIL
from shim.ops._stash_rows import ValidRows

__all__ = ["PagePool", "backend_for", "bits_of"]


def bits_of(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same width."""
    return tensor.view(BITS[tensor.element_size()])


def backend_for(name: str | None, device: torch.device) -> ModuleType:
    """The backend module: `name` if given, else Triton's on a GPU if Triton is installed, else eager."""
    if name == "eager" or (name is None and device.type != "cuda"):
        return _stash_eager
    try:
        from shim.ops import _stash_triton
    except ModuleNotFoundError as error:
        if name is None and error.name == "triton":
            return _stash_eager
        raise
    _stash_triton.check_device(device)
    return _stash_triton


class _Dropped(NamedTuple):
    """The pages of one `store`, given back. captured: whether a CUDA graph has recorded that store."""

    rows: ValidRows
    pages: Tensor
    where: Tensor
    expected: int
    captured: bool

    def record(self, stream: torch.cuda.Stream) -> None:
        """Let the allocator know the stream that has used the tensors: it may differ from that of the allocation."""
        for tensor in (self.rows.count, self.rows.place, self.pages, self.where):
            if tensor is not None:
                tensor.record_stream(stream)


class PagePool:
    """`pages` pages of `page_size` rows of `width` elements on `device`, and `host_pages` more in pinned memory.

    Free pages are a ring of page ids, taken at its head and given back at its tail. `give_back` may be called at any
    time and from any thread, also from a finaliser that runs in the middle of another call.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        width: int,
        page_size: int,
        pages: int,
        host_pages: int,
        device: torch.device,
        backend: ModuleType,
    ) -> None:
        if host_pages and device.type == "cuda" and backend is _stash_eager:
            raise ValueError(
                "torch cannot index pinned memory from a GPU: a host pool needs Triton; pip install triton"
            )
        self.dtype, self.width, self.page_size = dtype, width, page_size
        self.device, self.backend = device, backend
        self.captured = False
        # Known to the host without the device: tensors in the pool, their pages if all rows were valid, and their pages
        # for the expected rows.
        self.live = self.full = self.expected = self.most_full = self.most_expected = 0
        self.outgrown = False
        # The round of the stash in which the pool was last used, and the size before `give_up`.
        self.last_used = 0
        self.size_before: tuple[int, int] | None = None
        self._lock = threading.Lock()
        renew_in_children(self, "_lock", threading.Lock)
        self._dropped: deque[_Dropped] = deque()
        self._waiting: list[_Dropped] = []  # until the capture ends in which they were given back
        self._stream: torch.cuda.Stream | None = None
        with torch.inference_mode(False):
            self.state = torch.zeros(STATES, dtype=torch.int64, device=device)
        self.data: Tensor
        self.ring: Tensor
        self.host_ring: Tensor
        self.pages = self.host_pages = 0
        self.allocate_pages(pages, host_pages)

    @torch.inference_mode(False)  # tensors made in inference mode cannot be changed outside it
    def allocate_pages(self, pages: int, host_pages: int) -> bool:
        """Allocate the pool anew with these sizes. Returns False, without effect, if the pool is not empty."""
        with self._lock:
            if self.live:
                return False
            self._follow()
            if self.host_pages and self._stream is not None:
                self._stream.synchronize()  # the pinned allocator does not know which kernels still use the memory
            if self._stream is not None and self.pages:  # it may differ from the stream of the allocation
                for buffer in (self.data, self.ring, self.host_ring):
                    buffer.record_stream(self._stream)
            # Free the old memory before the allocation. If that fails, the pool is one without a size.
            self.pages = self.host_pages = 0
            self.data = self.host_data = torch.empty(0)
            self.data = self._buffer(pages, self.device)
            pinned = self.device.type == "cuda"
            self.host_data = self._buffer(host_pages, torch.device("cpu"), pinned) if host_pages else self.data[:0]
            self.ring = torch.arange(pages + 1, device=self.device)
            self.host_ring = torch.arange(host_pages + 1, device=self.device)
            for head, tail, size in (HEAD, TAIL, pages), (HOST_HEAD, HOST_TAIL, host_pages):
                self.state[head].zero_()  # counters keep their values
                self.state[tail].fill_(size)
            self.pages, self.host_pages, self.outgrown = pages, host_pages, False
            self.size_before = None
        return True

    def give_up(self) -> None:
        """Free the memory if the pool is empty and no CUDA graph uses it. `take_up` allocates it again."""
        size = self.pages, self.host_pages
        if any(size) and not self.captured and self.allocate_pages(0, 0):
            self.size_before = size

    def take_up(self) -> None:
        if self.size_before is not None:
            self.allocate_pages(*self.size_before)

    def _buffer(self, pages: int, device: torch.device, pinned: bool = False) -> Tensor:
        rows = pages * self.page_size + 2
        data = torch.empty(rows, self.width, dtype=BITS[self.dtype.itemsize], device=device, pin_memory=pinned)
        data[self.zero_row(pages)].zero_()
        return data

    def zero_row(self, pages: int) -> int:
        return pages * self.page_size

    def unused_row(self, pages: int) -> int:
        return pages * self.page_size + 1

    @property
    def nbytes(self) -> int:
        """Memory on the device, in bytes, with the ring and the state."""
        return sum(t.numel() * t.element_size() for t in (self.data, self.ring, self.host_ring, self.state))

    @property
    def host_nbytes(self) -> int:
        return self.host_data.numel() * self.host_data.element_size()

    def most_wanted(self) -> int:
        """The most pages ever wanted at once. Waits for the device."""
        return int(self.current_state()[MOST_WANTED])

    def current_state(self) -> Tensor:
        """The state, safe to read on the current stream."""
        self._release_dropped()
        with self._lock:
            self._follow()
        return self.state

    def store(
        self, tensor: Tensor, rows: ValidRows, pages: Tensor, where: Tensor, *, expected: int, kept: bool
    ) -> bool:
        """Take pages for the valid rows of `tensor` [rows, width] and copy the rows there, if there are enough pages.

        expected: the expected number of pages. kept: see the backend's `allocate`. Returns whether a CUDA graph has
        recorded it.
        """
        if self._waiting:
            self._release_dropped()
        with self._lock:
            self._follow()
            self.backend.allocate(self, rows.count, pages, where, kept)
            if self.pages or self.host_pages:
                self.backend.store(self, tensor, rows, pages, where)
            self._count(1, pages.numel(), expected)
        self._release_dropped()
        return capturing()

    def _count(self, tensors: int, full: int, expected: int) -> None:
        self.live += tensors
        self.full += full
        self.expected += expected
        self.outgrown |= self.expected > self.most_expected
        self.most_full = max(self.most_full, self.full)
        self.most_expected = max(self.most_expected, self.expected)

    def load(self, out: Tensor, rows: ValidRows, pages: Tensor, where: Tensor) -> None:
        with self._lock:
            self._follow()
            self.backend.load(self, out, rows, pages, where)
        self._release_dropped()

    def give_back(self, rows: ValidRows, pages: Tensor, where: Tensor, expected: int, captured: bool) -> None:
        """Give back the pages of one `store`, which has returned `captured`. Call it once for each."""
        self._dropped.append(_Dropped(rows, pages, where, expected, captured))
        self._release_dropped()

    def _release_dropped(self) -> None:
        # A finaliser may run inside store() or load() of the same thread. Then the lock is taken, and its holder calls
        # this again at the end. Nothing can be computed during a trace, so the next call does it.
        in_graph = capturing()
        while (
            (self._dropped or (self._waiting and not in_graph)) and not tracing() and self._lock.acquire(blocking=False)
        ):
            try:
                if not in_graph:
                    self._dropped.extend(self._waiting)
                    self._waiting.clear()
                while self._dropped:
                    dropped = self._dropped.popleft()
                    if in_graph and not dropped.captured:
                        # A graph would give these pages back at each of its replays.
                        self._waiting.append(dropped)
                        continue
                    self._follow()
                    if self._stream is not None:
                        dropped.record(self._stream)
                    self.backend.release(self, dropped.rows.count, dropped.pages, dropped.where)
                    self._count(-1, -dropped.pages.numel(), -dropped.expected)
            finally:
                self._lock.release()

    def _follow(self) -> None:
        """Let the current stream wait for the last stream that used the pool, if they differ.

        Replays of a CUDA graph are not visible here: use the pool on the replaying stream, or synchronise.
        """
        if self.device.type != "cuda":
            return
        current = torch.cuda.current_stream(self.device)
        in_graph = capturing()
        # A capture begins synchronised and may not wait for work outside the graph.
        if self._stream is not None and current != self._stream and not in_graph:
            current.wait_stream(self._stream)
        self._stream = current
        self.captured |= in_graph
