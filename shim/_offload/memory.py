"""Copies on the host: their memory, reused from sleep to sleep, and the copying."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shim._offload.found import GRADIENTS, Piece

__all__ = ["Copy"]

# torch rounds pinned memory up to a power of two, so a copy of 5 GB in one block would take 8.
_CHUNK = 1 << 28
_SPARE: WeakKeyDictionary[Any, list[Tensor]] = WeakKeyDictionary()  # chunks that no copy uses


class Copy:
    """Storages of the device, and their bytes on the host, packed into chunks. Gradients that are zero have no copy.

    owner: the object that keeps the chunks for the next time.
    """

    def __init__(self, pieces: Sequence[Piece], owner: Any) -> None:
        self.pieces, self._owner = pieces, owner
        self._zero: set[Piece] = set()
        self._chunks: list[Tensor] = []
        self._runs: list[tuple[Tensor, Tensor]] = []  # (bytes of the host, bytes of the device)

    def __str__(self) -> str:
        return f"{sum(piece.nbytes for piece in self.pieces):,} bytes"

    def make(self, pin: bool) -> None:
        """Copy to the host."""
        gradients = [piece for piece in self.pieces if piece.kinds == {GRADIENTS}]
        some = torch.stack([piece.flat().any() for piece in gradients]).tolist() if gradients else []
        self._zero = {piece for piece, nonzero in zip(gradients, some, strict=True) if not nonzero}
        copied = [piece for piece in self.pieces if piece not in self._zero]
        total = sum(piece.nbytes for piece in copied)
        spare = [chunk for chunk in _SPARE.get(self._owner, []) if chunk.is_pinned() == pin]
        for begin in range(0, total, _CHUNK):
            size = min(_CHUNK, total - begin)
            fitting = min((chunk for chunk in spare if len(chunk) >= size), key=len, default=None)
            spare = [chunk for chunk in spare if chunk is not fitting]
            self._chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=pin) if fitting is None else fitting)
        _SPARE[self._owner] = spare
        place = 0
        for piece in copied:
            flat = piece.flat()
            while len(flat):
                room = self._chunks[place // _CHUNK][place % _CHUNK :][: len(flat)]
                self._runs.append((room, flat[: len(room)]))
                flat, place = flat[len(room) :], place + len(room)
        self._run(back=False)

    def free(self) -> None:
        """Give the memory of the device back. Views of it stay views."""
        for piece in self.pieces:
            piece.storage.resize_(0)

    def put_back(self) -> None:
        for piece in self.pieces:
            piece.storage.resize_(piece.nbytes)
            if piece in self._zero:
                piece.flat().zero_()
        self._run(back=True)

    def release(self) -> None:
        """Keep the chunks for the next copy of this owner."""
        _SPARE.setdefault(self._owner, []).extend(self._chunks)

    def _run(self, back: bool) -> None:
        """Copy one way, behind all work of the device, and wait."""
        if self._runs:
            runtime: Any = getattr(torch, self._runs[0][1].device.type)
            runtime.synchronize()  # work of any stream may still use this memory
            stream = runtime.Stream()
            with runtime.stream(stream):
                for host, device in self._runs:
                    (device if back else host).copy_(host if back else device, non_blocking=True)
            stream.synchronize()
