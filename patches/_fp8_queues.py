"""Scales of delayed scaling for a checkpoint of megatron-core, if te-fp8-state is not applied.

Transformer Engine's queues belong to the process and are first in, first out. OwnEntries takes out what the forward
pass of a checkpoint puts there, and puts it in front at every recompute, in any order and any number of times. The
numbers of modules in the queues are part of a saved state, so they are restored.

_fp8_scales works in another way, and both are needed. te-fp8-state binds the functions of Transformer Engine that fill
the queues, so it gets scales before they are queued. A patch of megatron-core binds none of those functions and must
work alone, so it can only move entries of the queues around the calls of its own checkpoints.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules.module import register_module_forward_hook

from shim.patches._fp8_scales import BY_CHECKPOINT, POSITION, Meta, graph_is_kept, number, queues_owner

Queues = list[deque[Any]]


class OwnEntries:
    """The entries that Transformer Engine queues in the forward pass of one checkpoint, per module."""

    def __init__(self) -> None:
        self._kept: list[tuple[Meta, list[Any]]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The context of the forward pass."""
        before = [len(queue) for queue in _queues()]
        calls, metas = dict[int, int](), dict[int, Meta]()

        def entries_of(meta: Meta) -> int:
            place = meta.get(POSITION)
            return 0 if place is None else len(_queues()[place]) - (before[place] if place < len(before) else 0)

        def after(module: Any, *_: Any) -> None:
            meta = vars(module).get("fp8_meta")
            if meta is None or "scaling_fwd" not in meta or not module.fp8:
                return
            metas[id(meta)], calls[id(meta)] = meta, calls.get(id(meta), 0) + 1
            # Up to 2.19 a module in evaluation mode queues nothing. Scales do not change before the region ends.
            if entries_of(meta) < calls[id(meta)]:
                _manager().copy_forward_fp8_meta_tensors_for_recompute(meta)

        hook = register_module_forward_hook(after, always_call=True)
        try:
            yield
        finally:
            hook.remove()
            for meta in metas.values():
                taken = [_queues()[meta[POSITION]].pop() for _ in range(entries_of(meta))]
                self._kept.append((meta, taken[::-1]))
            given = [meta for meta in metas.values() if meta.get(POSITION, -1) >= len(before)]
            _take_back(given, _queues()[len(before) :])

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """The context of a recompute. Entries of a nested checkpoint stay behind the entries put in front here."""
        kept = [(meta, entries) for meta, entries in self._kept if entries]
        given = [meta for meta, _ in kept if POSITION not in meta]
        for meta in given:
            number(_manager(), meta)
        for meta, entries in kept:
            _queues()[meta[POSITION]].extendleft(reversed(entries))
        # Up to 2.3 Transformer Engine loses the state in a recompute. Every release loses it if the recompute raises.
        states = [[value.clone() for value in _values(meta)] for meta, _ in kept]
        try:
            yield
        finally:
            for meta, entries in kept:
                queue = _queues()[meta[POSITION]]
                while queue and any(queue[0] is entry for entry in entries):
                    queue.popleft()
            _take_back(given, [_queues()[meta[POSITION]] for meta in given])
            for (meta, _), values in zip(kept, states):
                for now, value in zip(_values(meta), values):
                    now.copy_(value)
        if not graph_is_kept():
            self._kept.clear()


def _take_back(metas: list[Meta], queues: Queues) -> None:
    """Remove the numbers of these modules and their queues, if those queues are empty and the last ones."""
    found = _queues()
    if len(metas) != len(queues) or any(queues) or any(a is not b for a, b in zip(queues, found[-len(queues) :])):
        return
    del found[len(found) - len(queues) :]
    for meta in metas:
        del meta[POSITION]


def _values(meta: Meta) -> tuple[Any, Any]:
    return meta["scaling_fwd"].scale, meta["scaling_fwd"].amax_history


def _manager() -> Any:
    from transformer_engine.pytorch.distributed import FP8GlobalStateManager

    return FP8GlobalStateManager


def _queues() -> Queues:
    queues: Queues = queues_owner(_manager()).fp8_tensors_recompute_buffer
    return queues


def scales_stay_with_checkpoints() -> bool:
    """Whether te-fp8-state is applied."""
    return hasattr(_manager().copy_forward_fp8_meta_tensors_for_recompute, BY_CHECKPOINT)
