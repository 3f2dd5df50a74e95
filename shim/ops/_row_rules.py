"""Operators of torch whose effect on rows is known, and which of their saved tensors hold rows.

From the rows of the gradients of a node's outputs, a rule derives the rows of the gradients of its inputs. A rule must
be right for rows whose gradient is zero and whose saved values are zeros: their results must be zero again, and finite.
Operators without a rule are left alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["SINGULAR", "Edges", "Operator", "Span", "holds_rows", "leading", "rule_for", "stays"]

SINGULAR = "its backward divides by it, or raises e to it, and rows that are not valid come back as zeros"

Shape = Sequence[int]


class Span(NamedTuple):
    """Rows `first` to `first + rows` of all rows. A tensor has them in its first `lead` dimensions, in order."""

    first: int
    rows: int
    lead: int


Edges = list["Span | None"]


class Operator(NamedTuple):
    """A node of autograd's graph.

    shapes: those of its outputs, None for an output without a gradient. inputs: the shapes of its inputs. outputs: the
    rows of the outputs that lead to the end; None for an output without rows. total: the number of all rows; None while
    unknown.
    """

    node: Any
    shapes: Sequence[Shape | None]
    inputs: Sequence[Shape | None]
    outputs: Mapping[int, Span | None]
    total: int | None

    @property
    def span(self) -> Span | None:
        """The common rows of all outputs; None if they differ."""
        spans = set(self.outputs.values())
        return spans.pop() if len(spans) == 1 else None

    @property
    def shape(self) -> Shape:
        return self.shapes[next(iter(self.outputs))] or ()

    def dims(self, name: str) -> list[int] | None:
        """Dimensions of the input as non-negative numbers; None for all."""
        value = getattr(self.node, "_saved_" + name)
        if value is None or value == ():
            return None
        shape = next((shape for shape in self.inputs if shape is not None), ())
        return [signed(one) % max(len(shape), 1) for one in (value if isinstance(value, tuple) else (value,))]

    def behind_rows(self, *names: str) -> bool:
        """Whether all of these dimensions come after those of the rows."""
        span = self.span
        found = [self.dims(name) for name in names]
        return span is not None and all(dims is not None and min(dims) >= span.lead for dims in found)

    def fitting(self, span: Span) -> Span | None:
        return span if self.total is None or 0 <= span.first <= self.total - span.rows else None


def signed(number: int) -> int:
    """A signed number that torch returns as unsigned."""
    return number - (1 << 64) if number >= 1 << 63 else number


def leading(shape: Shape, rows: int) -> int | None:
    """The number of leading dimensions of `shape` that multiply to `rows`; None if there is none."""
    product = 1
    for number, size in enumerate(shape, 1):
        product *= size
        if product == rows:
            return number
    return None


def holds_rows(shape: Shape | None, like: Shape, lead: int) -> bool:
    """Whether `shape` has rows in the same dimensions as `like`, so that broadcasting keeps them in place."""
    return shape is not None and len(shape) == len(like) and tuple(shape[:lead]) == tuple(like[:lead])


# Which inputs have the rows


def _each_row(operator: Operator) -> Edges:
    """Each output row comes from the same row of the inputs. Some inputs are broadcast."""
    span, like = operator.span, operator.shape
    return [span if span and holds_rows(shape, like, span.lead) else None for shape in operator.inputs]


def _within_rows(*names: str) -> Callable[[Operator], Edges]:
    """Like `_each_row`, if the dimensions that the operator works along are none of the rows' dimensions."""

    def edges(operator: Operator) -> Edges:
        if not operator.behind_rows(*names):
            return _nothing(operator)
        lead, like = operator.span.lead, operator.shape  # type: ignore[union-attr]
        return [
            operator.span if shape is not None and tuple(shape[:lead]) == tuple(like[:lead]) else None
            for shape in operator.inputs
        ]

    return edges


def _normalized(operator: Operator) -> Edges:
    span, shape = operator.span, operator.inputs[0]
    size = len(operator.node._saved_normalized_shape)
    inside = span is not None and shape is not None and len(shape) - size >= span.lead
    return [span if inside else None, *[None] * (len(operator.inputs) - 1)]


def _nothing(operator: Operator) -> Edges:
    return [None] * len(operator.inputs)


def _same_order(operator: Operator) -> Edges:
    span, shape = operator.span, operator.inputs[0]
    lead = None if span is None or shape is None else leading(shape, span.rows)
    return [None if span is None or lead is None else span._replace(lead=lead)]


def _permuted(operator: Operator) -> Edges:
    span, dims = operator.span, operator.dims("dims") or []
    return [span if span and dims[: span.lead] == list(range(span.lead)) else None]


def _matrix_product(place: int) -> Callable[[Operator], Edges]:
    """place: the index of the input with the rows. Inputs before it are added."""

    def edges(operator: Operator) -> Edges:
        added = _each_row(operator)[:place]
        span = operator.span
        return [*added, span if span and span.lead == 1 else None, None]

    return edges


def _batched_product(place: int) -> Callable[[Operator], Edges]:
    def edges(operator: Operator) -> Edges:
        added = _each_row(operator)[:place]
        span = operator.span
        if span is None or span.lead > 2:
            return _nothing(operator)
        return [*added, span, span if span.lead == 1 else None]

    return edges


def _grouped_product(operator: Operator) -> Edges:
    span, left, right = operator.span, *operator.inputs[:2]
    several = right is None or len(right) == 3
    rows = span is not None and span.lead == 1 and len(operator.shape) == 2 and (left is None or len(left) == 2)
    return [span if rows and several else None, *[None] * (len(operator.inputs) - 1)]


# Operators that split and join rows


def _concatenated(operator: Operator) -> Edges:
    span = operator.span
    if span is None or operator.behind_rows("dim"):
        return [span] * len(operator.inputs)
    if operator.dims("dim") != [0] or None in operator.inputs:
        return _nothing(operator)
    edges: Edges = []
    first = span.first
    for shape in operator.inputs:
        rows = math.prod(shape[: span.lead]) if len(shape) == len(operator.shape) else 0  # type: ignore[index,arg-type]
        edges.append(Span(first, rows, span.lead) if rows else None)
        first += rows
    return edges


def _stacked(operator: Operator) -> Edges:
    span, like, number = operator.span, operator.shape, len(operator.inputs)
    dim = signed(operator.node._saved_dim) % len(like)
    if span is None or dim >= span.lead:
        return [span] * number
    if dim != 0 or span.lead == 1:
        return _nothing(operator)
    rows = span.rows // number
    return [Span(span.first + place * rows, rows, span.lead - 1) for place in range(number)]


def _cut(start_of: Callable[[Operator, int], int | None]) -> Callable[[Operator], Edges]:
    """Each output is a part of the input along `dim`. start_of: the first index of the part."""

    def edges(operator: Operator) -> Edges:
        shape, dims = operator.inputs[0], operator.dims("dim")
        if shape is None or dims is None:
            return [None]
        found: set[Span | None] = set()
        for number, span in operator.outputs.items():
            if span is None:
                return [None]
            if dims[0] >= span.lead:
                found.add(span)
                continue
            start = start_of(operator, number)
            if dims[0] or start is None:
                return [None]
            lead = span.lead + len(shape) - len(operator.shapes[number] or shape)
            first = span.first - start * math.prod(shape[1:lead])
            found.add(operator.fitting(Span(first, math.prod(shape[:lead]), lead)))
        return [found.pop() if len(found) == 1 else None]

    return edges


def _slice_start(operator: Operator, number: int) -> int | None:
    node, size = operator.node, operator.inputs[0][0]  # type: ignore[index]
    if node._saved_step != 1:
        return None
    start = signed(node._saved_start or 0)
    return min(max(start + size if start < 0 else start, 0), size)


def _select_start(operator: Operator, number: int) -> int:
    return signed(operator.node._saved_index) % operator.inputs[0][0]  # type: ignore[index]


def _split_start(operator: Operator, number: int) -> int:
    return number * int(operator.node._saved_split_size)


def _sizes_start(operator: Operator, number: int) -> int:
    return sum(operator.node._saved_split_sizes[:number])


# Rules by the names of nodes, without "Backward" and a number


class Rule(NamedTuple):
    """The rule of one operator.

    edges: computes the rows of the inputs. holds: the names of saved tensors that hold rows; None for all that have
    rows in the same dimensions as the output. reason: why no saved tensor is stashed. along_rows: whether the operator
    mixes rows if it works along them, so that no input has rows.
    """

    edges: Callable[[Operator], Edges]
    holds: tuple[str, ...] | None = None
    reason: str = ""
    along_rows: bool = False


EACH_ROW = (
    "Abs Add Addcmul Alias Asinh Atan Ceil Celu Clamp ClampMax ClampMin Clone Copy Cos Cosh Elu Erf Erfc Exp Exp2 "
    "Expand Expm1 Fill Floor Frac Gelu Hardsigmoid Hardswish Hardtanh LeakyRelu Lerp LogSigmoid MaskedFill Maximum "
    "Minimum Mish Mul NativeDropout Neg Relu Round Rsub Sgn Sigmoid Sign Silu Sin Sinh Softplus Sub Tan Tanh "
    "Threshold ToCopy Trunc Where"
)
EACH_ROW_SINGULAR = (
    "Acos Acosh Asin Atan2 Atanh Div Hypot Log Log10 Log1p Log2 Logaddexp Logaddexp2 Pow Reciprocal Rsqrt Sqrt Xlogy"
)
SAME_ORDER = "ReshapeAlias Squeeze UnsafeView Unsqueeze View"
ALONG_DIM = "Cumsum Gather Glu LogSoftmax Max Mean Min Softmax Sort Sum Topk"
ALONG_DIM_SINGULAR = "Amax Amin LinalgVectorNorm Logsumexp Std Var"
RULES: dict[str, Rule] = {
    **{name: Rule(_each_row) for name in EACH_ROW.split()},
    **{name: Rule(_each_row, reason=SINGULAR) for name in EACH_ROW_SINGULAR.split()},
    **{name: Rule(_same_order, holds=()) for name in SAME_ORDER.split()},
    **{name: Rule(_within_rows("dim"), along_rows=True) for name in ALONG_DIM.split()},
    **{name: Rule(_within_rows("dim"), reason=SINGULAR) for name in ALONG_DIM_SINGULAR.split()},
    "Transpose": Rule(_within_rows("dim0", "dim1")),
    "Permute": Rule(_permuted),
    "NativeLayerNorm": Rule(_normalized, holds=("input",), along_rows=True),
    "FusedRmsNorm": Rule(_normalized, holds=("input",), along_rows=True),
    "Mm": Rule(_matrix_product(0), holds=("self",)),
    "Addmm": Rule(_matrix_product(1), holds=("mat1",)),
    "Bmm": Rule(_batched_product(0), holds=("self", "mat2")),
    "Baddbmm": Rule(_batched_product(1), holds=("batch1", "batch2")),
    "GroupedMm": Rule(_grouped_product, holds=("self",)),
    "Cat": Rule(_concatenated),
    "Stack": Rule(_stacked),
    "Slice": Rule(_cut(_slice_start)),
    "Select": Rule(_cut(_select_start)),
    "Split": Rule(_cut(_split_start)),
    "SplitWithSizes": Rule(_cut(_sizes_start)),
    "Unbind": Rule(_cut(lambda operator, number: number)),
}
SECOND_OPERANDS = "mat2", "batch2"  # of a product; they have rows only if each row has a separate matrix


@cache
def rule_for(name: str) -> Rule | None:
    """The rule for a node type, by torch's name of the type; None without a rule."""
    return RULES.get(re.sub(r"Backward(s|\d*)$", "", name))


def stays(operator: Operator, rule: Rule, name: str, tensor: Tensor) -> str:
    """Why a saved tensor of an operator whose outputs have rows is not stashed; "" if it is.

    name: torch's name of the operator's argument or result.
    """
    span = operator.span
    if rule.along_rows and not any(rule.edges(operator)):
        return "its operator mixes rows"
    if rule.reason and not _is_whole_power(operator.node):
        return rule.reason
    if span is None or (rule.holds is not None and name not in rule.holds):
        return "all rows share it"
    if name in SECOND_OPERANDS and span.lead != 1:
        return "all rows share it"
    if not holds_rows(tensor.shape, operator.shape, span.lead):
        return "its first dimension is not that of the rows"
    return ""


def _is_whole_power(node: Any) -> bool:
    """Whether the node is a power such as x**2, whose derivatives of all orders are finite at zero."""
    exponent = getattr(node, "_saved_exponent", None)
    return isinstance(exponent, (int, float)) and exponent > 0 and float(exponent).is_integer()
