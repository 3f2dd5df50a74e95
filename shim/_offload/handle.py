"""The public function, and what it returns.

A storage is freed by a resize to nothing, and made again by one to its size. So every tensor stays the object that it
is, and every view a view: parameters, shards of them, main_grad, buckets, tied weights.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

from shim._errors import OffloadError, OptionError
from shim._offload.found import GRADIENTS, KINDS, WEIGHTS, Found, Piece, unknown_optimizer
from shim._offload.guards import Guard
from shim._offload.memory import Copy

__all__ = ["Left", "Offloaded", "offload"]

_LOCK = threading.RLock()  # one sleep or wake at a time: two that share a storage would both copy it


class Left(NamedTuple):
    """Bytes that stayed on the device, and why."""

    bytes: int
    why: str


class Offloaded(AbstractContextManager["Offloaded"]):
    """What `offload` has moved to the host, until `restore`. Also a context manager, which restores at its end.

    freed: kind -> name of the parameter -> bytes. left: kind -> name of the parameter -> Left(bytes, why).
    """

    def __init__(self, where: str) -> None:
        self.freed: dict[str, Counter[str]] = {}
        self.left: dict[str, dict[str, Left]] = {}
        self._copy = Copy((), self)
        self._guard = Guard(self.freed, where)

    def restore(self) -> None:
        """Put everything back where it was, in the same tensors. A second call does nothing.

        Raises OffloadError if the device has too little memory, or if other code has given some of it memory meanwhile.
        Then all of it is still on the host, and restore() can be called again.
        """
        with _LOCK:
            copy = self._copy
            for kind, name in (part for piece in copy.pieces if piece.storage.nbytes() for part in piece.parts):
                raise OffloadError(
                    f"{kind} of {name} got memory from other code while asleep by shim.offload(), called at "
                    f"{self._guard.where}. The values are still on the host. Free that memory first"
                )
            try:
                copy.put_back()
                self._copy = Copy((), self)
            except BaseException as error:
                copy.free()
                if not isinstance(error, Exception):
                    raise
                raise OffloadError(
                    f"{copy} cannot be put back on the device: {error!r}. All of it is still on the host. Free memory "
                    "of the device, and call restore() again"
                ) from error
            copy.release()
            self._guard.take_down()

    def __exit__(self, *exc_info: object) -> None:
        self.restore()

    def __str__(self) -> str:
        freed = [f"{kind} {sum(parts.values()):,}" for kind, parts in self.freed.items()]
        left = [f"{kind} {sum(part.bytes for part in parts.values()):,}" for kind, parts in self.left.items()]
        return f"bytes freed: {', '.join(freed) or 0}; left on the device: {', '.join(left) or 0}"


def offload(
    models: nn.Module | Iterable[nn.Module], optimizer: Any = None, *, what: Sequence[str] = KINDS, pin: bool = True
) -> Offloaded:
    """Move what training needs to the host, and give its memory on the device back. `restore()` puts it back.

    models: the model, or its virtual pipeline chunks, wrapped or not.
    optimizer: of megatron-core or torch; one, several in a list, or None.
    what: any of "optimizer" (its states), "main_weights" (copies of weights in fp32), "gradients" (buffers, and those
        of weights and main weights), and "weights" (parameters, frozen ones too, buffers, and caches in FP8).
    pin: whether the copies lie in pinned memory, which the model keeps for the next time. Unpinned is slower.

    Every tensor stays the object that it is. A storage that serves two kinds moves if both are asked for. Gradients
    that are zero are not copied. What is asleep already, or on the host, is left alone. So calls may be repeated and
    nested, in any order and thread. Meanwhile a forward pass, a step and a checkpoint that need what is asleep raise
    OffloadError. No message is sent: each rank calls it for itself.

    Raises OptionError for an unknown kind, and for an optimizer that is neither of megatron-core nor torch's. Raises
    OffloadError, with nothing moved, if the host has too little memory, and for Megatron-FSDP, captured CUDA graphs,
    and memory that is registered with NCCL (nccl_ub).
    """
    wanted = [what] if isinstance(what, str) else list(what)
    chunks = [models] if isinstance(models, nn.Module) else _checked(models)
    odd = [word for word in wanted if word not in KINDS]
    if odd:
        raise OptionError(f"shim.offload() does not know what={odd[0]!r}; it knows {', '.join(map(repr, KINDS))}")
    unknown = unknown_optimizer(optimizer)
    if unknown is not None:
        raise OptionError(
            f"shim.offload() cannot look into {type(unknown).__module__}.{type(unknown).__qualname__}, so that its "
            "states would stay on the device. Pass the optimizer of megatron-core or torch that is inside of it"
        )
    caller: Any = sys._getframe(1)
    while caller.f_globals.get("__name__", "").startswith("shim.patches."):  # methods of megatron-core's that call it
        caller = caller.f_back
    asleep = Offloaded(f"{caller.f_code.co_filename}:{caller.f_lineno}")
    with _LOCK:
        _refuse_what_cannot_sleep(chunks, wanted)
        _wait_for_messages(chunks)
        found = Found({f"{place}:" if place else "": chunk for place, chunk in enumerate(chunks)}, optimizer)
        asleep._copy = copy = Copy(_chosen(found, wanted, asleep), chunks[0])
        try:
            copy.make(pin)
        except Exception as error:
            raise OffloadError(
                f"{copy} cannot be copied to the host: {error}. Nothing was moved. Free memory of the host, pass "
                "pin=False, or name less in what="
            ) from error
        try:
            asleep._guard.put_up(found.modules, found.optimizers)
            copy.free()
            if GRADIENTS in wanted:
                _drop_scratch(asleep)
            for runtime in {getattr(torch, piece.tensor.device.type) for piece in found.pieces.values()}:
                runtime.empty_cache()  # else torch keeps the memory for itself
            return asleep
        except BaseException:
            copy.free()  # restore() takes all or nothing, and every value is on the host
            asleep.restore()
            raise


def _checked(models: Iterable[nn.Module]) -> list[nn.Module]:
    """As a list, which the first pass does not use up."""
    chunks: list[Any] = list(models) if isinstance(models, Iterable) else [models]
    wrong = [type(each).__name__ for each in chunks if not isinstance(each, nn.Module)]
    if wrong or not chunks:
        raise OptionError(f"shim.offload() takes a model or several in a list, not {wrong[0] if wrong else 'none'}")
    return chunks


def _chosen(found: Found, wanted: Sequence[str], asleep: Offloaded) -> list[Piece]:
    """The pieces to move. Notes what is freed and what is left."""
    chosen = []
    for piece in found.pieces.values():
        others = sorted(piece.kinds - set(wanted))
        shared = f"shares memory with {', '.join(others)}" if len(others) < len(piece.kinds) else "not asked for"
        why = shared if others else piece.obstacle()
        chosen += [] if why else [piece]
        for (kind, name), size in piece.shares().items():
            if why:
                before = asleep.left.setdefault(kind, {}).get(name, Left(0, why)).bytes
                asleep.left[kind][name] = Left(before + size, why)
            else:
                asleep.freed.setdefault(kind, Counter())[name] += size
    return chosen


def _drop_scratch(asleep: Offloaded) -> None:
    """Tensors without a value to keep, which are made on demand: they are not put back."""
    te: Any = sys.modules.get("transformer_engine.pytorch.module.base")
    workspace: Any = getattr(sys.modules.get("megatron.core.parallel_state"), "_GLOBAL_MEMORY_BUFFER", None)
    dummies, buffers = getattr(te, "_dummy_wgrads", {}), getattr(workspace, "buffer", {})
    for name, scratch in (("dummy gradients", dummies), ("workspace", buffers)):
        size = sum(each.numel() * each.itemsize for each in scratch.values() if each.device.type != "cpu")
        scratch.clear()
        if size:
            asleep.freed.setdefault(GRADIENTS, Counter())[name] += size


def _wait_for_messages(chunks: Iterable[nn.Module]) -> None:
    """A gather of weights or a sum of gradients that is under way writes into a buffer."""
    for chunk in chunks:
        for group in [*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ())]:
            for name, handle in vars(group).items():
                if name.endswith("_handle") and hasattr(handle, "wait"):
                    handle.wait()


def _refuse_what_cannot_sleep(chunks: Iterable[nn.Module], wanted: Sequence[str]) -> None:
    moved = [kind for kind in (WEIGHTS, GRADIENTS) if kind in wanted]
    for module in (module for chunk in chunks for module in chunk.modules()):
        runners = getattr(getattr(module, "cudagraph_manager", None), "cudagraph_runners", None)
        reason = ""
        if hasattr(module, "param_and_grad_buffer"):
            reason = "is of Megatron-FSDP, which frees its buffers itself. Use DistributedDataParallel"
        elif moved and (runners or getattr(module, "cuda_graphs", None)):
            reason = f"has captured CUDA graphs, which know addresses. Leave {' and '.join(moved)} out of what="
        elif moved and getattr(getattr(module, "ddp_config", None), "nccl_ub", False):
            reason = f"has buffers that are registered with NCCL. Leave {' and '.join(moved)} out of what="
        if reason:
            raise OffloadError(f"shim.offload(): {type(module).__name__} {reason}")
