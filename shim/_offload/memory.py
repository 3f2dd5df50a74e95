"""Copies on the host: their memory, reused from sleep to sleep, and the copying."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shim._offload.found import Piece

__all__ = ["Copy"]

# torch rounds pinned memory up to a power of two, so a copy of 5 GB in one block would take 8.
_CHUNK = 1 << 28
_SPARE: WeakKeyDictionary[Any, list[Tensor]] = WeakKeyDictionary()  # chunks that no copy uses


class Copy:
    """Bytes of storages on the host, packed into chunks. owner: the object that keeps the chunks for the next time."""

    def __init__(self, pieces: Sequence[Piece], owner: Any, pin: bool) -> None:
        self._owner = owner
        self._chunks: list[Tensor] = []
        self._runs: list[tuple[Tensor, Tensor]] = []  # (bytes of the host, bytes of the device)
        total = sum(piece.nbytes for piece in pieces)
        spare = [chunk for chunk in _SPARE.get(owner, []) if chunk.is_pinned() == pin]
        for begin in range(0, total, _CHUNK):
            size = min(_CHUNK, total - begin)
            fitting = min((chunk for chunk in spare if len(chunk) >= size), key=len, default=None)
            spare = [chunk for chunk in spare if chunk is not fitting]
            self._chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=pin) if fitting is None else fitting)
        _SPARE[owner] = spare
        place = 0
        for piece in pieces:
            flat = piece.flat()
            while len(flat):
                room = self._chunks[place // _CHUNK][place % _CHUNK :][: len(flat)]
                self._runs.append((room, flat[: len(room)]))
                flat, place = flat[len(room) :], place + len(room)

    def run(self, back: bool) -> None:
        """Copy to the host, or back, behind all work of the device, and wait."""
        if self._runs:
            runtime: Any = getattr(torch, self._runs[0][1].device.type)
            runtime.synchronize()  # work of any stream may still use this memory
            stream = runtime.Stream()
            with runtime.stream(stream):
                for host, device in self._runs:
                    (device if back else host).copy_(host if back else device, non_blocking=True)
            stream.synchronize()

    def release(self) -> None:
        """Keep the chunks for the next copy of this owner."""
        _SPARE.setdefault(self._owner, []).extend(self._chunks)
