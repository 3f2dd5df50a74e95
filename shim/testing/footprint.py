"""The footprint of a step on any device: the most bytes held at one time, and its collectives."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from shim._torch_names import required

__all__ = ["Footprint"]

_Mode: Any = required("torch.utils._python_dispatch:TorchDispatchMode")
tree_iter = required("torch.utils._pytree:tree_iter")


class Footprint(_Mode):  # type: ignore[misc]
    """Watches every operation below autograd inside the context, also in backward.

        with testing.Footprint() as footprint:
            loss(logits, target).backward()
        footprint.peak_bytes    # the most bytes that storages made inside held at one time
        footprint.held_bytes    # the bytes that they hold now
        footprint.collectives   # {"allreduce_": 3}, by the names of torch's c10d operations
        footprint.message_bytes # of the tensors that this rank gives to them
        footprint.operations    # how many of any kind

    A storage counts from the operation that returns it until it is freed. Earlier storages do not count, nor do
    temporaries inside one operation or inside compiled code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.collectives: Counter[str] = Counter()
        self.held_bytes = 0
        self.message_bytes = 0
        self.operations = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.operations += 1
        namespace, _, name = function._schema.name.partition("::")
        if namespace == "c10d":
            self.collectives[name] += 1
            self.message_bytes += sum(value.nbytes for value in tree_iter((args, kwargs)) if torch.is_tensor(value))
        given = {value.untyped_storage()._cdata for value in tree_iter((args, kwargs)) if torch.is_tensor(value)}
        found = function(*args, **(kwargs or {}))
        for value in tree_iter(found):
            if torch.is_tensor(value) and value.untyped_storage()._cdata not in self._known | given:
                self._count(value.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        self._known.add(storage._cdata)
        self.held_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())

    def _freed(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self.held_bytes -= size
