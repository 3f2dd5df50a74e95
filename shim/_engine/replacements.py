"""A foreign function in the place of upstream's: may a patch go around it, or try it?

Both orders ask here, of a function that was there first and of one that came after shim, so that both end alike.
"""

from __future__ import annotations

import ast
from typing import Any

from shim._engine.foreign import takes_the_same
from shim._engine.reach import written_of
from shim._engine.texts import texts_of
from shim._matrix.model import Needs
from shim._planning.contract import breach_of
from shim._planning.decision import Decision
from shim._planning.plan import Plan
from shim._record import record
from shim._releases.fingerprint import FunctionNode, split_target

__all__ = ["Around", "Question", "is_method", "is_tried", "may_go_around"]


@record
class Around:
    """A foreign function that a target stands around, in words, and why shim takes it."""

    who: str
    why: str


@record
class Question:
    """Whether a patch has its effect with a foreign function in the place of a method. Only a model can tell.

    target: what the patch binds or relies on.    method: where the function stands, which may be on the way to it.
    """

    patch: str
    target: str
    method: str
    function: Any
    who: str


def is_method(name: str) -> bool:
    """Whether ``module:qualname`` is an attribute of a class."""
    return "." in split_target(name)[1]


def is_tried(target: str, decision: Decision, plan: Plan) -> bool:
    """Whether the patch has a way to try a foreign function on a target."""
    return target in plan.matrix.patches[decision.id].probe


def may_go_around(target: str, body: str, inner: Any, decision: Decision, plan: Plan) -> tuple[bool, str]:
    """Whether the factory of a target holds around a foreign function, and why, or why not ("": it never does).

    It does if the matrix says `wraps`, the function takes the calls that upstream's takes, and its text keeps the
    contract of the target, if that has one. body: see Variant.inherits.
    """
    wiring = decision.wiring
    if wiring is None or target not in wiring.wraps_any:
        return False, ""
    if not takes_the_same(body, inner, plan.environment.sources):
        return False, "takes other arguments than upstream's"
    if target not in wiring.needs:
        return True, "takes the same arguments"
    found = _breach(inner, wiring.needs[target])
    return (False, f"breaks the contract: {found}") if found else (True, "keeps the contract")


def _breach(function: Any, needs: Needs) -> str:
    written = written_of(function)
    texts = texts_of(written.__code__) if hasattr(written, "__code__") else ()
    if len(texts) != 1 or not isinstance(texts[0], FunctionNode):
        return "its text cannot be read"
    return breach_of(_without_wraps(texts[0]), needs)


def _without_wraps(node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """The function without functools.wraps, which changes no call."""
    kept = [d for d in node.decorator_list if not (isinstance(d, ast.Call) and ast.unparse(d.func).endswith("wraps"))]
    if len(kept) == len(node.decorator_list):
        return node
    fields = {name: getattr(node, name) for name in node._fields}
    return type(node)(**{**fields, "decorator_list": kept})
