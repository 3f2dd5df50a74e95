"""Messages between ranks that take their time, for tests of code that counts on their order.

gloo takes and delivers a small message at once, so an order that is wrong may work by luck. Here each message
waits a little before it leaves, and before it arrives.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from shim.testing.patience import patience

__all__ = ["slow_messages"]

ACKNOWLEDGED = 7  # the tag of a receiver's answer


@contextlib.contextmanager
def slow_messages(seed: int, longest: float = 0.03) -> Iterator[None]:
    """Let messages of torch.distributed.isend, irecv and batch_isend_irecv take their time; on all ranks that talk.

    A message keeps its place among those of its direction, peer and group. On either side it is held for 0 to `longest`
    seconds, by a random number from the seed: most are quick, and some are late. A send reads its tensor after that: it
    sends other numbers if the tensor has given its memory away by then. It is over when the other side has the
    message, as NCCL may have it. A received message is in its tensor after the wait for it, and not before it has
    come.

    The context ends when all messages are over. Raises TimeoutError if the other side does not come.
    """
    channels: dict[Any, _Channel] = {}
    real_isend: Any = dist.isend
    real_irecv: Any = dist.irecv

    def deliver(message: _Message, peer: int, group: Any) -> None:
        real_isend(message.to_send(), peer, group=group).wait()
        real_irecv(torch.empty(1), peer, group=group, tag=ACKNOWLEDGED).wait()

    def receive(message: _Message, peer: int, group: Any) -> None:
        real_irecv(message.tensor, peer, group=group).wait()
        real_isend(torch.zeros(1), peer, group=group, tag=ACKNOWLEDGED).wait()

    def given(carry: Callable[[_Message, int, Any], None], tensor: Tensor, peer: int, group: Any) -> _Message:
        key = carry.__name__, peer, group
        if key not in channels:
            delays = random.Random(f"{seed} {dist.get_rank()} {carry.__name__} {peer}")
            channels[key] = _Channel(lambda message: carry(message, peer, group), delays, longest)
        return channels[key].take(tensor)

    def isend(tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> _Message:
        return given(deliver, tensor, dst, group)

    def irecv(tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> _Message:
        return given(receive, tensor, src, group)

    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        return [op.op(op.tensor, op.peer, op.group) for op in p2p_op_list]

    with contextlib.ExitStack() as undo:
        for function in (isend, irecv, batch_isend_irecv):
            # P2POp looks the first two up in the module that defines them.
            for module in (dist, distributed_c10d):
                undo.enter_context(mock.patch.object(module, function.__name__, function))
        try:
            yield
        finally:
            for channel in channels.values():
                channel.close()


class _Message:
    """The work of a message. It keeps the tensor that it was given, as those of torch do, and its address."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.address, self.shape, self.dtype = tensor.data_ptr(), tensor.shape, tensor.dtype
        self.over = threading.Event()
        self.error: RuntimeError | None = None

    def to_send(self) -> Tensor:
        """The values at the address now."""
        if self.tensor.data_ptr() == self.address:
            return self.tensor.detach()
        return torch.linspace(-1, 1, self.shape.numel()).to(self.dtype).reshape(self.shape)

    def wait(self, timeout: Any = None) -> bool:
        if not self.over.wait(patience()):
            raise TimeoutError("the other side has not come for this message")
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.over.is_set()


class _Channel:
    """Carries the messages of one direction between two ranks, one after the other, in a separate thread."""

    def __init__(self, carry: Callable[[_Message], None], delays: random.Random, longest: float) -> None:
        self.carry, self.delays, self.longest = carry, delays, longest
        self.waiting: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def take(self, tensor: Tensor) -> _Message:
        message = _Message(tensor)
        self.waiting.put(message)
        return message

    def close(self) -> None:
        self.waiting.put(None)
        self.thread.join(patience())

    def _run(self) -> None:
        while (message := self.waiting.get()) is not None:
            time.sleep(self.longest * self.delays.random() ** 4)
            try:
                self.carry(message)
            except RuntimeError as error:  # the wait for the message raises it
                message.error = error
            message.over.set()
