"""Scales of delayed scaling, kept by the checkpoint whose forward pass they belong to.

Transformer Engine keeps what a recompute takes again in queues of the process, first in, first out: one of scales for
each module, and one that says whether a module was the first of its region. That is right where recomputes come in the
order of their forward passes, each of them once. Here every checkpoint has its own `ForwardScales` instead, which
te-fp8-state fills from Transformer Engine's own functions and hands back to them; those queues stay empty. Where that
patch is not in force, nothing fills them, and _fp8_queues says what is done instead.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from shim._errors import ShimError

# Where Transformer Engine keeps the number of a module's queue, from 2.1 on.
POSITION = "global_fp8_buffer_pos_fwd_recompute"
# What te-fp8-state writes on Transformer Engine's function, so that others see it in force.
BY_CHECKPOINT = "shim_keeps_scales_by_checkpoint"

Meta = dict[str, Any]  # fp8_meta of a module


class ScalesError(ShimError, RuntimeError):
    """A module of Transformer Engine is recomputed under delayed scaling, but its forward pass has left no scales."""


class ForwardScales:
    """What the forward pass of one checkpoint leaves for its recomputes, however many there are, in whatever order.

    It goes when the checkpoint does, so that what never ran backward, or raised, leaves nothing. `numbered`:
    Transformer Engine keeps scales for this checkpoint by itself too, and so gives its modules the numbers of their
    queues, which are part of a saved state.
    """

    def __init__(self, numbered: bool = False) -> None:
        self.numbered = numbered
        # By the identity of fp8_meta, which is kept beside it: amax history and scale for each call of the module.
        self._kept: dict[int, tuple[Meta, list[Any]]] = {}
        # Whether a module of its region is still to come when the forward pass begins; None before.
        self.is_first_module: bool | None = None

    def keep(self, meta: Meta, entry: Any) -> None:
        self._kept.setdefault(id(meta), (meta, []))[1].append(entry)

    def of(self, meta: Meta) -> list[Any]:
        return self._kept[id(meta)][1] if id(meta) in self._kept else []

    def __bool__(self) -> bool:
        return bool(self._kept)

    def release(self) -> None:
        """Forget what a second backward would need, where this one frees the graph as well."""
        if not graph_is_kept():
            self._kept.clear()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the forward pass. Checkpoints around this one keep the same: they are going to recompute it too."""
        before = _now.recording
        _now.recording = (*before, self)
        try:
            yield
        finally:
            _now.recording = before

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Around a recompute, which begins again with the first call of every module."""
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
    """One recompute: how far each module has come in what its forward pass has left."""

    def __init__(self, scales: ForwardScales) -> None:
        self.scales = scales
        self.entered = False  # the region of Transformer Engine that belongs to it
        self._taken: dict[int, int] = {}
        self._open: dict[int, tuple[Any, Meta]] = {}

    def take(self, manager: Any, meta: Meta) -> list[Any]:
        """The entry of the next call of this module, in a list that is empty where nothing was kept."""
        number = self._taken.get(id(meta), 0)
        self._taken[id(meta)] = number + 1
        self._open[id(meta)] = manager, meta
        return self.scales.of(meta)[number : number + 1]

    def abandon(self) -> None:
        """Give modules that an exception has left in the middle of a recompute the scales from before it."""
        for manager, meta in self._open.values():
            if "updated_scale_fwd" in meta:
                manager.restore_fp8_meta_tensors(meta)


class _Now(threading.local):
    """The checkpoints that this thread is in: backward runs in threads of its own."""

    recording: tuple[ForwardScales, ...] = ()
    replay: Replay | None = None


_now = _Now()


def recording() -> tuple[ForwardScales, ...]:
    """The checkpoints in whose forward pass this thread is, from the outermost on."""
    return _now.recording


def replay() -> Replay | None:
    """The recompute that this thread is in."""
    return _now.replay


def graph_is_kept() -> bool:
    """Whether the backward that this call is in keeps its graph, so that another one may follow."""
    # Outside of any there is nothing to free. A torch that does not say is taken to keep it.
    if torch._C._current_graph_task_id() == -1:
        return True
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keeps is None or bool(keeps())


def queues_owner(manager: Any) -> Any:
    """What has the queues of Transformer Engine: an object of its own from 2.15."""
    return getattr(manager, "quantization_state", manager)


def number(manager: Any, meta: Meta) -> None:
    """Give a module the number of a queue, as Transformer Engine does when it first keeps something for it."""
    queues = queues_owner(manager).fp8_tensors_recompute_buffer
    queues.append(deque())
    meta[POSITION] = len(queues) - 1


@contextmanager
def own_queue(manager: Any, meta: Meta, entries: list[Any]) -> Iterator[deque[Any]]:
    """While it is entered, Transformer Engine finds `entries` as the queue of this module, and leaves its own alone."""
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
    """While it is entered, Transformer Engine finds `flags` as its queue of flags of first modules."""
    from transformer_engine.pytorch.distributed import FP8GlobalStateManager, activation_recompute_forward

    if flags == [None]:  # the forward pass was in another one's region: it is as that region has left it
        state = getattr(FP8GlobalStateManager, "quantization_state", None)  # from 2.15
        flags = [FP8GlobalStateManager.IS_FIRST_FP8_MODULE if state is None else state.is_first_fp8_module]
    queue = activation_recompute_forward._is_first_fp8_module
    activation_recompute_forward._is_first_fp8_module = flags
    try:
        yield flags
    finally:
        activation_recompute_forward._is_first_fp8_module = queue


class Within(AbstractContextManager[Any]):
    """A context of upstream's inside of one that `ours` makes anew each time: it may be entered again and again."""

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
