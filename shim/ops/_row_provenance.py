"""Which tensors saved by autograd hold rows, told by their path from the inputs and to the outputs.

A saved tensor may be stashed by its valid rows under two conditions: the gradients of its node's outputs are zero in
all invalid rows, and the node does not mix rows. A walk back from the outputs shows the first, as long as
operators keep rows in place. The operator shows the second. Shapes alone show neither: a weight may have as many rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from shim.ops._row_rules import Operator, Span, leading, rule_for, stays
from shim.ops._saved_tensors import Saved, saved_by
from shim.ops._stash_compiled import CompiledRegions, is_compiled

__all__ = ["COMPILED", "RowTensor", "row_tensors"]

COMPILED = "compiled code of torch.compile has saved it, and its effect on rows is not known"
RECOMPUTED = "a checkpoint has saved it, and its recompute needs all rows"
WEIGHT = "it comes from weights alone"
UNKNOWN = "a custom function has made it, and its source is not known: see block_of"
NOT_ROWS = "it is not known to hold rows that come from the inputs"
MIXED = "a later operator does not keep rows in place: {}"
NO_SHAPES = "this torch does not tell the shapes of gradients"
CHECKPOINTS = "CheckpointFunction", "_CheckpointFunction"

Edge = tuple[Any, int]  # a node, and the number of its output


class RowTensor(NamedTuple):
    """A saved tensor with its rows, or with the reason why it stays. A weight has neither: it always stays."""

    saved: Saved
    span: Span | None
    reason: str = ""


class _Inputs:
    """The inputs of the forward, at which the walk ends, and which of them have rows.

    tensors: inputs that may have rows. others: inputs without rows, such as weights. Without `tensors`, every earlier
    tensor that is no parameter may have rows, but only for operators with a rule.
    """

    def __init__(self, tensors: Collection[Tensor], others: Collection[Tensor], start: int, rows: int) -> None:
        with_rows = [tensor for tensor in tensors if not isinstance(tensor, torch.nn.Parameter)]
        with_rows = [tensor for tensor in with_rows if leading(tensor.shape, rows) is not None]
        self.start, self.rows = start, rows
        everything = [*tensors, *others]
        self.unknown = not tensors
        self.nodes = {tensor.grad_fn for tensor in everything} - {None}
        self.edges: set[Edge] = {(tensor.grad_fn, tensor.output_nr) for tensor in with_rows if tensor.grad_fn}
        self.by_memory: dict[int | None, list[Tensor]] = {}
        for tensor in with_rows:
            self.by_memory.setdefault(_address(tensor), []).append(tensor)
        self.by_memory.pop(None, None)

    def ends_at(self, node: Any) -> bool:
        return node in self.nodes or node._sequence_nr() < self.start or _leaf_of(node) is not None

    def sources_of(self, tensor: Tensor) -> list[Tensor]:
        """The inputs with the same memory."""
        return self.by_memory.get(_address(tensor), []) if self.by_memory else []

    def may_be_behind(self, node: Any) -> bool:
        """Whether a node at the end of the walk may have rows."""
        leaf = _leaf_of(node)
        if leaf is None:
            return self.unknown or node in self.nodes
        if self.unknown:
            return not isinstance(leaf, torch.nn.Parameter)
        return bool(self.sources_of(leaf))


def row_tensors(
    outputs: Iterable[Tensor],
    start: int,
    rows: int,
    inputs: Iterable[Tensor] = (),
    others: Iterable[Tensor] = (),
    compiled: CompiledRegions | None = None,
) -> Iterator[RowTensor]:
    """The saved tensors of all nodes between `inputs` and `outputs` that this thread made from number `start` on.

    inputs: those with `rows` rows have rows. others: further inputs without rows, at which the walk ends.
    compiled: the torch.compile regions that are known to work elementwise.
    Without inputs, nodes are told apart by their numbers only, and each thread numbers its nodes separately.
    """
    return _Walk(list(outputs), _Inputs(list(inputs), list(others), start, rows), compiled or CompiledRegions()).saved()


class _Walk:
    def __init__(self, outputs: list[Tensor], inputs: _Inputs, compiled: CompiledRegions) -> None:
        self.inputs, self.compiled = inputs, compiled
        self.spans: dict[Any, dict[int, Span | None]] = {}  # rows of the gradients of each node's used outputs
        self.mixed: dict[Any, str] = {}  # node without rows -> the name of the node that is the reason
        self.order = self._order([output.grad_fn for output in outputs])
        self.has_functions = any(isinstance(node, BackwardCFunction) for node in self.order)
        self._carries: dict[Edge, bool] = {}
        self._behind: dict[Any, bool] = {}
        for node in reversed(self.order):
            following = [edge for edge, _ in node.next_functions]
            self._behind[node] = any(edge is None or self._leads_to_rows(edge) for edge in following)
            if self.has_functions:
                for number in range(len(_shapes(node))):
                    self._carries[node, number] = self._is_made_from_rows(node, number)
        for output in outputs:
            if output.grad_fn is not None:
                lead = leading(output.shape, inputs.rows)
                span = None if lead is None else Span(0, inputs.rows, lead)
                self._note(output.grad_fn, output.output_nr, span, "an output without that many rows")
        for node in self.order:
            self._pass_on(node)

    def _order(self, roots: list[Any]) -> list[Any]:
        """The nodes in topological order from the outputs: each node before the nodes it leads to."""
        inputs, uses, waiting = self.inputs, {}, []
        for root in dict.fromkeys(roots):
            if root is not None and not inputs.ends_at(root):
                uses[root] = 0
                waiting.append(root)
        found = list(waiting)
        while waiting:
            for edge, _ in waiting.pop().next_functions:
                if edge is None or inputs.ends_at(edge):
                    continue
                if edge not in uses:
                    uses[edge] = 0
                    waiting.append(edge)
                    found.append(edge)
                uses[edge] += 1
        ready, order = [node for node in found if not uses[node]], []
        while ready:
            order.append(ready.pop())
            for edge, _ in order[-1].next_functions:
                if edge in uses:
                    uses[edge] -= 1
                    if not uses[edge]:
                        ready.append(edge)
        return order

    # From the outputs back: which gradients are zero in invalid rows

    def _note(self, node: Any, number: int, span: Span | None, reason: str) -> None:
        """Note the rows of a gradient of a node's output. If two uses disagree, the output has no rows."""
        spans = self.spans.setdefault(node, {})
        if number in spans and spans[number] != span:
            span = None
        spans[number] = span
        if span is None:
            self.mixed.setdefault(node, reason)

    def _pass_on(self, node: Any) -> None:
        outputs = self.spans.get(node, {})
        edges, reason = self._inputs_of(node, outputs)
        for (edge, number), span in zip(node.next_functions, edges, strict=True):
            if edge is not None:
                self._note(edge, number, span, self.mixed.get(node, reason))

    def _inputs_of(self, node: Any, outputs: dict[int, Span | None]) -> tuple[list[Span | None], str]:
        """The rows of the gradients of a node's inputs, and the node's name, the reason if there are none."""
        name = type(node).__name__
        if isinstance(node, BackwardCFunction):
            return self._inputs_of_function(node, outputs), name
        rule, operator = rule_for(name), _operator(node, outputs, self.inputs.rows)
        if rule is None or operator is None or None in outputs.values():
            return [None] * len(node.next_functions), name
        return rule.edges(operator), name

    def _inputs_of_function(self, node: Any, outputs: dict[int, Span | None]) -> list[Span | None]:
        """A custom function is trusted to keep rows in place, if they come from the inputs."""
        spans = set(outputs.values())
        span = spans.pop() if len(spans) == 1 else None
        if span is None or self._reason_of_function(node):
            return [None] * len(node.next_functions)
        found: list[Span | None] = []
        for edge, number in node.next_functions:
            shape = _shape_of(edge, number)
            lead = None if shape is None or not self._carries_rows(edge, number) else leading(shape, span.rows)
            found.append(None if lead is None else span._replace(lead=lead))
        return found

    def _reason_of_function(self, node: Any) -> str:
        if is_compiled(node):
            return "" if self.compiled.have(node) else COMPILED
        return RECOMPUTED if getattr(getattr(node, "_forward_cls", None), "__name__", "") in CHECKPOINTS else ""

    # From the inputs on: which outputs are made from rows

    def _leads_to_rows(self, node: Any) -> bool:
        return self._behind[node] if node in self._behind else self.inputs.may_be_behind(node)

    def _carries_rows(self, node: Any, number: int) -> bool:
        if (node, number) in self._carries:
            return self._carries[node, number]
        leaf = _leaf_of(node)
        return (node, number) in self.inputs.edges or (leaf is not None and bool(self.inputs.sources_of(leaf)))

    def _is_made_from_rows(self, node: Any, number: int) -> bool:
        """Whether an output has any rows that come from the inputs."""
        shape = _shapes(node)[number]
        if shape is None:
            return False
        following = node.next_functions
        if isinstance(node, BackwardCFunction):
            if self._reason_of_function(node):
                return False
            edges: list[bool] = [True] * len(following)
        else:
            rule, lead = rule_for(type(node).__name__), leading(shape, self.inputs.rows) or 1
            span = Span(0, _rows_in(shape, lead), lead)
            operator = _operator(node, {number: span}, None)
            if rule is None or operator is None or not shape:
                return False
            edges = [one is not None for one in rule.edges(operator)]
        if any(of_rows and self._carries_rows(*edge) for of_rows, edge in zip(edges, following, strict=True)):
            return True
        if not any(of_rows and edge is None for of_rows, (edge, _) in zip(edges, following, strict=True)):
            return False
        # An input that requires no gradient has no node, but the node may have saved it.
        tensors = (one.tensor for one in saved_by(node))
        return any(tensor is not None and self.inputs.sources_of(tensor) for tensor in tensors)

    # The saved tensors

    def saved(self) -> Iterator[RowTensor]:
        for node in self.order:
            outputs = self.spans.get(node, {})
            for one in saved_by(node):
                if one.tensor is None:
                    yield RowTensor(one, None, one.reason)
                else:
                    yield self._judge(node, outputs, one, one.tensor)

    def _judge(self, node: Any, outputs: dict[int, Span | None], saved: Saved, tensor: Tensor) -> RowTensor:
        root = _base_of(tensor)
        weight = root.is_leaf and root.requires_grad and not self.inputs.unknown and not self.inputs.sources_of(root)
        if weight or isinstance(root, torch.nn.Parameter):
            return RowTensor(saved, None)
        of_function = isinstance(node, BackwardCFunction)
        reason = self._reason_of_function(node) if of_function else ""
        if reason or not outputs or None in outputs.values():
            return RowTensor(saved, None, reason or MIXED.format(self.mixed.get(node, type(node).__name__)))
        if of_function:
            return self._judge_of_function(node, outputs, saved, tensor)
        rule, operator = rule_for(type(node).__name__), _operator(node, outputs, self.inputs.rows)
        if operator is None:
            return RowTensor(saved, None, NO_SHAPES)
        if rule is None:
            return RowTensor(saved, None, f"nothing is known of {type(node).__name__}")
        reason = stays(operator, rule, saved.name, tensor)
        if not reason and tensor.grad_fn is not None and not self._leads_to_rows(tensor.grad_fn):
            reason = WEIGHT
        return RowTensor(saved, None if reason else operator.span, reason)

    def _judge_of_function(self, node: Any, outputs: dict[int, Span | None], saved: Saved, tensor: Tensor) -> RowTensor:
        spans = set(outputs.values())
        if len(spans) != 1:
            return RowTensor(saved, None, NOT_ROWS)
        base, span = _base_of(tensor), self._span_of(node, tensor)
        if span is None and base is not tensor:
            span = self._span_of(node, base)
            span = None if span is None else _part_of(tensor, base, span)
        if span is not None:
            return RowTensor(saved, span)
        return RowTensor(saved, None, NOT_ROWS if base.grad_fn is not None else UNKNOWN)

    def _span_of(self, node: Any, tensor: Tensor) -> Span | None:
        """The rows of a custom function's saved tensor: an input or output of the function or of the forward."""
        inputs = self.inputs
        if is_compiled(node) and tuple(tensor.shape) == _shapes(node)[0]:  # the region works elementwise
            return next(iter(self.spans[node].values()))
        for source in inputs.sources_of(tensor):
            lead = leading(source.shape, inputs.rows)
            span = None if lead is None else _part_of(tensor, source, Span(0, inputs.rows, lead))
            if span is not None:
                return span
        if tensor.grad_fn is None:
            return None
        edge = tensor.grad_fn, tensor.output_nr
        span = self.spans.get(edge[0], {}).get(edge[1])
        if edge[0] is node and span is None:  # an unused output
            span = next(iter(self.spans[node].values()))
        if span is None or not self._carries_rows(*edge):
            return None
        lead = leading(tensor.shape, span.rows)
        return None if lead is None else span._replace(lead=lead)


def _leaf_of(node: Any) -> Tensor | None:
    """The leaf whose gradient accumulates in a node."""
    return node.variable if type(node).__name__ == "AccumulateGrad" else None


def _operator(node: Any, outputs: dict[int, Span | None], total: int | None) -> Operator | None:
    shapes = _shapes(node)
    if not shapes or not outputs or not node.next_functions:
        return None
    return Operator(node, shapes, [_shape_of(*edge) for edge in node.next_functions], outputs, total)


def _shapes(node: Any) -> list[tuple[int, ...] | None]:
    """The shapes of a node's outputs, which are also those of their gradients."""
    leaf = _leaf_of(node)
    if leaf is not None:
        return [tuple(leaf.shape)]
    return [None if one is None else tuple(one.shape) for one in getattr(node, "_input_metadata", ())]


def _shape_of(node: Any, number: int) -> tuple[int, ...] | None:
    shapes = [] if node is None else _shapes(node)
    return shapes[number] if number < len(shapes) else None


def _rows_in(shape: tuple[int, ...], lead: int) -> int:
    rows = 1
    for size in shape[:lead]:
        rows *= size
    return rows


def _address(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):  # a quantized or sparse tensor has several storages, or none
        return None


def _base_of(tensor: Tensor) -> Tensor:
    """The base of a view that was made without a gradient, such as inside a custom forward; else `tensor`."""
    base = tensor._base
    return tensor if base is None or tensor.grad_fn is not None else base


def _part_of(tensor: Tensor, whole: Tensor, span: Span) -> Span | None:
    """The rows of a view of `whole`, which has the rows `span`; None if the view does not consist of rows."""
    if tensor.data_ptr() == whole.data_ptr() and (tensor.shape, tensor.stride()) == (whole.shape, whole.stride()):
        return span if tensor.dtype == whole.dtype else None
    if tensor.layout != torch.strided or tensor.dtype != whole.dtype or not tensor.numel() or not tensor.dim():
        return None
    start = int(tensor.storage_offset() - whole.storage_offset())
    if span.lead == 1:
        pitch = whole.stride(0)
    elif whole.is_contiguous():
        pitch = whole.numel() // span.rows
    else:
        return None
    if pitch <= 0 or start < 0:
        return None
    first, column = divmod(start, pitch)
    if tensor.is_contiguous() and whole.is_contiguous() and column == 0 and tensor.numel() % pitch == 0:
        rows = tensor.numel() // pitch
    elif tensor.shape[0] == 1 or tensor.stride(0) == pitch:
        rows = tensor.shape[0]
        inside = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
        if column + sum((size - 1) * stride for size, stride in inside) >= pitch:
            return None
    else:
        return None
    lead = leading(tensor.shape, rows)
    return Span(span.first + first, rows, lead) if lead is not None and first + rows <= span.rows else None
