"""The public function, and what it returns."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shim._errors import OffloadError, OptionError
from shim._offload.found import GRADIENTS, KINDS, MAIN, OPTIMIZER, WEIGHTS, Found, Piece
from shim._offload.guards import Guard
from shim._offload.memory import Copy

__all__ = ["Left", "Offloaded", "offload", "offload_optimizer"]

_LOCK = threading.RLock()  # one sleep or wake at a time: two that share a storage would both copy it


class Left(NamedTuple):
    """Bytes that stayed on the device, and why."""

    bytes: int
    why: str


class Offloaded:
    """What `offload` has moved to the host, until `restore`. Also a context manager, which restores at its end.

    freed: kind -> name of the parameter -> bytes. left: kind -> name of the parameter -> Left(bytes, why).
    """

    def __init__(self, where: str) -> None:
        self.freed: dict[str, Counter[str]] = {}
        self.left: dict[str, dict[str, Left]] = {}
        self.where = where  # the call of shim.offload()
        self._copied: list[Piece] = []
        self._zero: list[Piece] = []  # gradients without a copy
        self._copy: Copy | None = None
        self._guard = Guard((), (), (), where)

    def restore(self) -> None:
        """Put everything back where it was, in the same tensors. A second call does nothing.

        Raises OffloadError if the device has too little memory, or if other code has given some of it memory meanwhile.
        Then all of it is still on the host, and restore() can be called again.
        """
        with _LOCK:
            if self._copy is None:
                return
            pieces = [*self._copied, *self._zero]
            for kind, name in (part for piece in pieces if piece.storage.nbytes() for part in piece.parts):
                raise OffloadError(
                    f"{kind} of {name} got memory from other code while asleep by shim.offload() at {self.where}. The "
                    "values are still on the host. Let either shim or that code put them back, and free that memory"
                )
            try:
                for piece in pieces:
                    piece.storage.resize_(piece.nbytes)
                for piece in self._zero:
                    piece.flat().zero_()
                self._copy.run(back=True)
            except BaseException as error:
                self._free(pieces)
                if not isinstance(error, Exception):
                    raise
                raise OffloadError(
                    f"{_size(pieces)} cannot be put back on the device: {error!r}. All of it is still on the host. "
                    "Free memory of the device, and call restore() again"
                ) from error
            self._copy.release()
            self._copied, self._zero, self._copy = [], [], None
            self._guard.take_down()

    def _sleep(self, found: Found, pieces: Sequence[Piece], owner: Any, pin: bool, but: Sequence[str] = ()) -> None:
        gradients = [piece for piece in pieces if piece.kinds == {GRADIENTS}]
        some = torch.stack([piece.flat().any() for piece in gradients]).tolist() if gradients else []
        self._zero = [piece for piece, nonzero in zip(gradients, some, strict=True) if not nonzero]
        self._copied = [piece for piece in pieces if piece not in self._zero]
        try:
            copy = Copy(self._copied, owner, pin)
            copy.run(back=False)
        except Exception as error:
            raise OffloadError(
                f"{_size(self._copied)} cannot be copied to the host: {error}. Nothing was moved. Free memory of the "
                "host, pass pin=False, or name less in what="
            ) from error
        self._copy = copy
        try:
            self._guard = Guard(found.modules, found.optimizers, list(self.freed), self.where, but)
            self._free(pieces)
        except BaseException:
            self._free(pieces)  # restore() takes all or nothing, and every value is on the host
            self.restore()
            raise

    @staticmethod
    def _free(pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            piece.storage.resize_(0)

    def __enter__(self) -> Offloaded:
        return self

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

        asleep = shim.offload(model, optimizer)
        ...                                        # rollout
        asleep.restore()

    models: the model, or its virtual pipeline chunks, wrapped or not. optimizer: of megatron-core, or None.
    what: any of "optimizer" (its states), "main_weights" (copies of weights in fp32), "gradients" (buffers, and those
        of weights and main weights), and "weights" (parameters, frozen ones too, buffers, and caches in FP8).
    pin: whether the copies lie in pinned memory, which the model keeps for the next time. Unpinned is slower.

    Every tensor stays the object that it is. A storage that serves two kinds moves if both are asked for. Gradients
    that are zero are not copied. What is asleep already, or on the host, is left alone. So calls may be repeated and
    nested, in any order and thread. Meanwhile a forward pass, a step and a checkpoint that need what is asleep raise
    OffloadError. No message is sent: each rank calls it for itself.

    Raises OptionError for an unknown kind. Raises OffloadError, with nothing moved, if the host has too little memory,
    and for Megatron-FSDP, captured CUDA graphs, and memory that is registered with NCCL (nccl_ub).
    """
    wanted = [what] if isinstance(what, str) else list(what)
    chunks = [models] if isinstance(models, nn.Module) else list(models)
    if not chunks or not set(wanted) <= set(KINDS):
        raise OptionError(f"shim.offload() takes models, of which there are {len(chunks)}, and what= of {KINDS}")
    caller = sys._getframe(1)
    asleep = Offloaded(f"{caller.f_code.co_filename}:{caller.f_lineno}")
    with _LOCK:
        _refuse_what_cannot_sleep(chunks, wanted)
        _wait_for_messages(chunks)
        found = Found({f"{place}:" if place else "": chunk for place, chunk in enumerate(chunks)}, optimizer)
        asleep._sleep(found, _chosen(found, wanted, asleep), chunks[0], pin)
        if GRADIENTS in wanted:
            _drop_scratch(asleep)
        _empty_cache(found)
    return asleep


def offload_optimizer(optimizer: Any, weights: Iterable[nn.Parameter], where: str) -> Offloaded:
    """Move states and main weights alone: for methods of the optimizer itself, which may be called meanwhile.

    weights: the model's, which stay. where: the call, for messages.
    """
    asleep = Offloaded(where)
    with _LOCK:
        found = Found({"": nn.ParameterList(weights)}, optimizer)
        found.modules = []
        pieces = _chosen(found, (OPTIMIZER, MAIN), asleep)
        asleep._sleep(found, pieces, optimizer, pin=True, but=("offload_to_cpu", "restore_from_cpu"))
        _empty_cache(found)
    return asleep


def _empty_cache(found: Found) -> None:
    """Else torch keeps the memory for itself."""
    for runtime in {getattr(torch, piece.tensor.device.type) for piece in found.pieces.values()}:
        runtime.empty_cache()


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
    for name, held in (("dummy gradients", (te, "_dummy_wgrads")), ("workspace", (workspace, "buffer"))):
        scratch: dict[Any, Tensor] = getattr(*held, {})
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


def _size(pieces: Iterable[Piece]) -> str:
    return f"{sum(piece.nbytes for piece in pieces):,} bytes"
