"""Scales of delayed scaling, kept by the checkpoint whose forward pass they belong to.

Transformer Engine keeps a recompute's state in queues of the process, first in, first out: one queue of scales for each
module, and one of flags for whether a module was the first of its region. That works only if recomputes run once each,
in the order of their forward passes. Here every checkpoint has its own `ForwardScales` instead. te-fp8-state fills it
from Transformer Engine's own functions and passes it back to them; the queues stay empty. Without te-fp8-state nothing
fills it, and _fp8_queues takes over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from shim._errors import ShimError
from shim._torch_names import find
from shim.patches._named import Named

# Where Transformer Engine keeps the number of a module's queue, from 2.1 on.
POSITION = "global_fp8_buffer_pos_fwd_recompute"
# te-fp8-state sets this attribute on Transformer Engine's function, so that other patches see it is applied.
BY_CHECKPOINT = "shim_keeps_scales_by_checkpoint"

Meta = dict[str, Any]  # fp8_meta of a module


class ScalesError(ShimError, RuntimeError):
    """A module of Transformer Engine is recomputed under delayed scaling, but its forward pass kept no scales."""


class ForwardScales:
    """The scales of one checkpoint's forward pass, for any number of recomputes in any order.

    They are freed with the checkpoint, also if backward never ran or raised. `numbered`: in stock, Transformer Engine
    keeps scales for this checkpoint too and so numbers the queues of its modules. A saved state has the numbers.
    """

    def __init__(self, numbered: bool = False) -> None:
        self.numbered = numbered
        # id(fp8_meta) -> fp8_meta, and amax history and scale for each call of the module.
        self._kept: dict[int, tuple[Meta, list[Any]]] = {}
        # Whether the first module of the region is still to come when the forward pass begins; None before that.
        self.is_first_module: bool | None = None

    def keep(self, meta: Meta, entry: Any) -> None:
        self._kept.setdefault(id(meta), (meta, []))[1].append(entry)

    def of(self, meta: Meta) -> list[Any]:
        return self._kept[id(meta)][1] if id(meta) in self._kept else []

    def __bool__(self) -> bool:
        return bool(self._kept)

    def release(self) -> None:
        """Forget the scales if this backward frees the graph, so that no second backward can follow."""
        if not graph_is_kept():
            self._kept.clear()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The context of the forward pass. Outer checkpoints record the same scales: they recompute this one too."""
        before = _now.recording
        _now.recording = (*before, self)
        try:
            yield
        finally:
            _now.recording = before

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """The context of a recompute, which starts with the first call of every module."""
        before = _now.recording, _now.replay
        _now.recording, _now.replay = (), Replay(self)
        try:
            yield
        except BaseException:
            _now.replay.abandon()
            raise
        finally:
            _now.recording, _now.replay = before


class Replay:
    """One recompute: how many of its kept scales each module has used."""

    def __init__(self, scales: ForwardScales) -> None:
        self.scales = scales
        self.entered = False  # whether Transformer Engine's region of this recompute was entered
        self._taken: dict[int, int] = {}
        self._open: dict[int, tuple[Any, Meta]] = {}

    def take(self, manager: Any, meta: Meta) -> list[Any]:
        """The entry of the module's next call, in a list; an empty list if none was kept."""
        number = self._taken.get(id(meta), 0)
        self._taken[id(meta)] = number + 1
        self._open[id(meta)] = manager, meta
        return self.scales.of(meta)[number : number + 1]

    def abandon(self) -> None:
        """Restore the scales of modules that an exception left in the middle of a recompute."""
        for manager, meta in self._open.values():
            if "updated_scale_fwd" in meta:
                manager.restore_fp8_meta_tensors(meta)


class _Now(Named, threading.local):
    """The checkpoints that this thread is in. Per thread, because backward runs in threads of autograd."""

    recording: tuple[ForwardScales, ...] = ()
    replay: Replay | None = None


_now = _Now()


def recording() -> tuple[ForwardScales, ...]:
    """The checkpoints whose forward pass this thread is in, outermost first."""
    return _now.recording


def replay() -> Replay | None:
    """The recompute that this thread is in."""
    return _now.replay


def graph_is_kept() -> bool:
    """Whether the running backward keeps its graph, so that a second backward may follow."""
    # Outside a backward nothing is freed. If torch cannot tell, the graph counts as kept.
    task = find("torch:_C._current_graph_task_id")
    if task is None or task() == -1:
        return True
    keeps = find("torch:_C._autograd._get_current_graph_task_keep_graph")
    return keeps is None or bool(keeps())


def queues_owner(manager: Any) -> Any:
    """The object that has the queues of Transformer Engine: the manager, from 2.15 on its quantization_state."""
    return getattr(manager, "quantization_state", manager)


def number(manager: Any, meta: Meta) -> None:
    """Give a module a numbered queue, as Transformer Engine does when it first queues scales for the module."""
    queues = queues_owner(manager).fp8_tensors_recompute_buffer
    queues.append(deque())
    meta[POSITION] = len(queues) - 1


@contextmanager
def own_queue(manager: Any, meta: Meta, entries: list[Any]) -> Iterator[deque[Any]]:
    """Inside, Transformer Engine uses `entries` as the queue of this module, and does not touch its own queue."""
    owner = queues_owner(manager)
    queue, queues = deque(entries), owner.fp8_tensors_recompute_buffer
    position = {POSITION: meta[POSITION]} if POSITION in meta else {}
    owner.fp8_tensors_recompute_buffer, meta[POSITION] = [queue], 0
    try:
        yield queue
    finally:
        owner.fp8_tensors_recompute_buffer = queues
        del meta[POSITION]
        meta.update(position)


@contextmanager
def own_flags(flags: list[Any]) -> Iterator[list[Any]]:
    """Inside, Transformer Engine uses `flags` as its queue of first-module flags."""
    from transformer_engine.pytorch.distributed import FP8GlobalStateManager, activation_recompute_forward

    if flags == [None]:  # the forward pass ran in an outer checkpoint's region, so that region's flag counts
        state = getattr(FP8GlobalStateManager, "quantization_state", None)  # from 2.15
        flags = [FP8GlobalStateManager.IS_FIRST_FP8_MODULE if state is None else state.is_first_fp8_module]
    queue = activation_recompute_forward._is_first_fp8_module
    activation_recompute_forward._is_first_fp8_module = flags
    try:
        yield flags
    finally:
        activation_recompute_forward._is_first_fp8_module = queue


class Within(AbstractContextManager[Any]):
    """A reusable context: upstream's context inside one that `ours` makes at each entry."""

    def __init__(self, ours: Callable[[], AbstractContextManager[Any]], upstream: AbstractContextManager[Any]) -> None:
        self._ours, self._upstream, self._entered = ours, upstream, list[ExitStack]()

    def __enter__(self) -> Any:
        with ExitStack() as stack:
            stack.enter_context(self._ours())
            result = stack.enter_context(self._upstream)
            self._entered.append(stack.pop_all())
        return result

    def __exit__(self, *exception: Any) -> bool:
        return bool(self._entered.pop().__exit__(*exception))
