"""One forward pass under a stash: which saved tensors are stashed, and which stay."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shim._torch_names import missing, required
from shim.ops._checks import capturing, is_plain
from shim.ops._row_provenance import RowTensor, row_tensors
from shim.ops._row_rules import Span
from shim.ops._saved_tensors import HOOKED, foreign_hooks_active, now
from shim.ops._stash_compiled import CompiledRegions
from shim.ops._stash_layout import BITS
from shim.ops._stash_pool import PagePool
from shim.ops._stash_rows import ValidRows, valid_rows
from shim.ops._stashed_tensor import StashedTensor

__all__ = ["StashGroup", "tensors_in"]

# The least bytes of a row. A narrower row costs more in the list of pages than it saves.
NARROWEST = 16
GIVEN_UP = "its memory was given up and will be recomputed"


NUMBER, TASK = "torch:_C._autograd._get_sequence_nr", "torch:_C._current_graph_task_id"
TRANSFORMS, LEVEL = "torch:_C._functorch.peek_interpreter_stack", "torch.autograd.forward_ad:_current_level"


class Stash(Protocol):
    """The interface of a stash for its groups: see shim.ops.PagedStash."""

    overflow: str

    def settle(self) -> None: ...

    def begin_forward(self) -> None: ...

    def skip(self, reason: str) -> None: ...

    def pool_for(self, tensor: Tensor, width: int) -> PagePool: ...

    def count_offered(self, tensors: int) -> None: ...

    def await_flags(self, records: list[weakref.ref[StashedTensor]], flags: Tensor) -> None: ...


class StashGroup:
    """One forward: enter the group, run the forward, leave the group, and commit the output."""

    def __init__(
        self,
        stash: Stash,
        rows: int,
        valid: Tensor | int | None,
        expected: int,
        inputs: Collection[Tensor],
        weights: Collection[Tensor],
        block_of: Callable[[Tensor], int | None] | None,
        compiled: CompiledRegions,
    ) -> None:
        self._stash, self._rows, self._valid, self._expected = stash, rows, valid, expected
        self._inputs, self._weights, self._block_of, self._compiled = inputs, weights, block_of, compiled
        self._start: int | None = None

    def __enter__(self) -> StashGroup:
        self._start = None
        if torch.compiler.is_compiling():
            return self
        stash = self._stash
        stash.settle()
        stash.begin_forward()
        if not torch.is_grad_enabled():
            return self
        reason = _unable() or _transformed()
        if reason:
            stash.skip(reason)
        elif required(TASK)() != -1:
            stash.skip("it is recomputed in backward, which uses it at once")
        elif foreign_hooks_active():
            stash.skip(HOOKED)
        else:
            self._start = now()
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if kind is not None:
            self._start = None  # no output, so nothing to commit

    def commit(self, output: Any) -> None:
        """Stash tensors saved on the way to `output`: a tensor, or a nest of tuples, lists, dicts and dataclasses."""
        start, self._start = self._start, None
        if start is None:
            return
        outputs = list(tensors_in(output))
        device = next((one.device for one in outputs if one.grad_fn is not None), None)
        if device is None and output is not None:
            self._stash.skip(f"no tensor that has a gradient was found in the output, a {type(output).__name__}")
            return
        weights = {_address(weight) for weight in self._weights}
        chosen: dict[tuple[Any, ...], _Chosen] = {}
        for one in row_tensors(outputs, start, self._rows, self._inputs, self._weights, self._compiled):
            slot, tensor = one.saved.slot, one.saved.tensor
            span = one.reason if tensor is None else self._choose(tensor, one, device, weights)
            if isinstance(span, str):
                self._stash.skip(span)
            if tensor is None or not isinstance(span, _Span):
                continue
            # The same memory saved twice is stashed once.
            memory = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
            chosen.setdefault((*memory, tensor.dtype, span), _Chosen(tensor, span, [])).slots.append(slot)
        if chosen and device is not None:
            self._store(list(chosen.values()), device)

    def _store(self, chosen: list[_Chosen], device: torch.device) -> None:
        stash = self._stash
        rows = valid_rows(self._rows, self._valid, device)
        decides = stash.overflow == "keep" and not (device.type == "cuda" and capturing())
        flags = torch.zeros(len(chosen), dtype=torch.int64, device=device)
        records = []
        for number, (tensor, span, slots) in enumerate(chosen):
            flag, of_tensor = flags[number : number + 1], span.of(rows)
            pool = stash.pool_for(tensor, tensor.numel() // of_tensor.rows)
            # A pool without pages has no size yet.
            kept = decides or not (pool.pages or pool.host_pages)
            expected = math.ceil(self._expected * of_tensor.rows / self._rows)
            record = StashedTensor(tensor, of_tensor, pool, flag, expected=expected, kept=kept)
            records.append(weakref.ref(record))
            for slot in slots:
                try:
                    slot.register_hooks(lambda _, record=record: record, StashedTensor.restore)
                except RuntimeError:  # older torch shows hooks only by this error
                    stash.skip(HOOKED)
        stash.count_offered(len(chosen))
        chosen.clear()  # frees the originals, unless a record keeps one
        if decides:
            stash.await_flags(records, flags)

    def _choose(
        self, tensor: Tensor, found: RowTensor, device: torch.device | None, weights: Collection[int | None]
    ) -> _Span | str | None:
        """The rows of a tensor, or why it stays; None if it is expected to stay (a weight)."""
        if isinstance(tensor, torch.nn.Parameter):
            return None
        if not is_plain(tensor) or tensor.layout != torch.strided:
            return f"it is a {type(tensor).__name__} of layout {tensor.layout}"
        if tensor.untyped_storage().data_ptr() in weights:
            return None
        if tensor.device != device:
            return f"it is on {tensor.device}, and the output on {device}"
        block = None if self._block_of is None else self._block_of(tensor)
        if block is not None:
            return self._reason_against_blocks(tensor, block) or _Span(0, self._rows, block)
        if tensor.numel() and tensor.untyped_storage().nbytes() == 0:
            return GIVEN_UP
        if found.span is None:
            return found.reason or None
        return _reason_against(tensor, found.span) or _Span(found.span.first, found.span.rows, 1)

    def _reason_against_blocks(self, tensor: Tensor, block: int) -> str:
        if tensor.numel() == 0 or self._rows % block or tensor.numel() % (self._rows // block):
            return "its size, or its blocks, do not fit the number of rows"
        if block != 1 and not self._first_rows():
            return "it has one row for a block of rows, and the valid rows are not the first ones"
        return _reason_against_memory(tensor)

    def _first_rows(self) -> bool:
        valid = self._valid
        return not isinstance(valid, Tensor) or (valid.dtype != torch.bool and valid.numel() == 1)


class _Span(NamedTuple):
    """The rows that a tensor has: `rows` from `first` on, or one row for each block of them."""

    first: int
    rows: int
    block: int

    def of(self, rows: ValidRows) -> ValidRows:
        if self.block > 1:
            return rows.blocks_of(self.block)
        return rows if self.rows == rows.rows else rows.part(self.first, self.rows)


class _Chosen(NamedTuple):
    """A tensor to stash, and the slots in which autograd saved it."""

    tensor: Tensor
    span: _Span
    slots: list[Any]


def _unable() -> str:
    """Why no group can be stashed with this torch, or ""."""
    name = missing((NUMBER, TASK, TRANSFORMS, LEVEL))
    return f"torch {torch.__version__} has no {name}, without which autograd's graph cannot be read" if name else ""


def _transformed() -> str:
    """Why a forward under an active transform is left alone; "" without a transform."""
    if required(TRANSFORMS)() is not None:
        return "a transform of torch.func is active, whose tensors have no separate memory"
    if required(LEVEL) >= 0:
        return "forward-mode differentiation is active, and a copy in pages has no tangent"
    return ""


def _address(weight: Tensor) -> int | None:
    try:
        return weight.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a quantized or sparse tensor has several storages, or none
        return None


def _reason_against(tensor: Tensor, span: Span) -> str:
    """Why a tensor with such rows stays; "" if it is stashed."""
    if tensor.numel() == 0:
        return "it is empty"
    if tensor.is_complex():
        return f"its dtype is {tensor.dtype}"
    if not _has_rows_of_values(tensor):
        return f"its dtype is {tensor.dtype}: indices, or quantized data whose rows could be others"
    if tensor.numel() // span.rows * tensor.element_size() < NARROWEST:
        return f"its rows have less than {NARROWEST} bytes"
    return _reason_against_memory(tensor)


def _reason_against_memory(tensor: Tensor) -> str:
    if tensor.element_size() not in BITS or tensor.is_complex():
        return f"its dtype is {tensor.dtype}"
    if tensor.untyped_storage().nbytes() == 0:
        return GIVEN_UP
    if tensor.is_neg() or _overlaps(tensor):
        return "its elements share memory, or are stored negated"
    return ""


def _has_rows_of_values(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bool or (tensor.is_floating_point() and tensor.element_size() > 1)


def _overlaps(tensor: Tensor) -> bool:
    """Whether two elements may share memory, as in an expanded tensor."""
    last = 0  # the place of the last element of the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= last:
            return True
        last += stride * max(size - 1, 0)
    return False


def tensors_in(output: Any, mappings: bool = True) -> Iterator[Tensor]:
    """The tensors in a nest of tuples, lists, dataclasses and, if `mappings`, dicts."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for item in output.values() if mappings else ():
            yield from tensors_in(item, mappings)
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from tensors_in(item, mappings)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name, None), mappings)
