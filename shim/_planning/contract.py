"""Whether a body that is unknown keeps what a patch needs of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shim._errors import SourceError
from shim._matrix.model import Needs, Place, Sign
from shim._releases.detect import DISTRIBUTIONS
from shim._releases.fingerprint import FunctionNode, definitions, split_target
from shim._releases.phrases import binds, in_order, nodes_of, returns_only, stands_in, strays
from shim._releases.sources import Sources

__all__ = ["breach", "breach_of", "shows"]


def breach(sources: Sources, body: str, needs: Needs) -> str:
    """How the body ``module:qualname`` breaks the contract `needs`, in words. "" if it keeps the contract."""
    try:
        return next(filter(None, (breach_of(node, needs) for node in _definitions(sources, body))), "")
    except SourceError as error:
        return str(error)
    except RecursionError:
        return f"{body} is nested too deeply to be read"


def breach_of(function: ast.FunctionDef | ast.AsyncFunctionDef, needs: Needs) -> str:
    """How a function breaks the contract `needs`, in words. "" if it keeps the contract."""
    return next(_breaches(function, needs), "")


def shows(sources: Sources, sign: Sign) -> bool:
    """Whether all places of a sign are there. False if one cannot be read."""
    try:
        return all(_shows(sources, place) for place in sign.places)
    except (SourceError, RecursionError):
        return False


def _shows(sources: Sources, place: Place) -> bool:
    module, qualname = split_target(place.target)
    try:
        found = definitions(sources.tree(module), qualname)
    except SourceError as error:
        if error.cause != "missing":
            raise
        found = []
    if not (place.has or place.lacks):
        return not found and _package_is_there(sources, module)
    nodes = [nodes_of(definition.node) for definition in found]
    having = [in_order(place.has, each) is None for each in nodes]
    shown = any(having) if place.once else bool(having) and all(having)
    return shown and not any(stands_in(phrase, each) for phrase in place.lacks for each in nodes)


def _package_is_there(sources: Sources, module: str) -> bool:
    """A name of a package that is not there is also missing, and shows nothing."""
    packages = (distribution.package for distribution in DISTRIBUTIONS.values())
    return any(f"{module}.".startswith(f"{package}.") and sources.path(package) is not None for package in packages)


def _definitions(sources: Sources, body: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    module, qualname = split_target(body)
    found = [definition.node for definition in definitions(sources.tree(module), qualname)]
    if not found:
        raise SourceError(f"{module} has no {qualname}", "missing")
    functions = [node for node in found if isinstance(node, FunctionNode)]
    if len(functions) != len(found):
        raise SourceError(f"{qualname} is not only a function there", "changed")
    return functions


def _breaches(function: ast.FunctionDef | ast.AsyncFunctionDef, needs: Needs) -> Iterator[str]:
    if isinstance(function, ast.AsyncFunctionDef):
        yield "it is a coroutine"
    a = function.args
    named = [parameter.arg for parameter in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    for name in needs.parameters:
        if name.startswith("*"):
            if name.lstrip("*") != getattr(a.kwarg if name.startswith("**") else a.vararg, "arg", None):
                yield f"it has no parameter {name}"
        elif name not in named:
            yield f"it has no parameter {name!r}"
    if needs.first and named[: len(needs.first)] != list(needs.first):
        yield f"its parameters do not begin with {', '.join(needs.first)}"
    if needs.exact:
        may = {name.lstrip("*") for name in (*needs.parameters, *needs.first, *needs.also)}
        variadic = [v.arg for v in (a.vararg, a.kwarg) if v is not None]
        more = [name for name in (*named, *variadic) if name not in may]
        if more:
            yield f"it has a parameter more: {more[0]!r}"
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    odd = [text for text in decorators if text not in needs.decorators]
    if odd:
        yield f"it has a decorator more: {odd[0]}"
    gone = [text for text in needs.decorators if text not in decorators]
    if gone:
        yield f"it lacks the decorator {gone[0]}"
    nodes = nodes_of(function)
    missing = in_order(needs.has, nodes)
    if missing is not None:
        where = "at the place it had" if stands_in(missing, nodes) else ""
        yield " ".join(filter(None, (f"it lacks `{missing}`", where)))
    for phrase in needs.lacks:
        if stands_in(phrase, nodes):
            yield f"it has `{phrase}`"
    for name in needs.keeps:
        if binds(name, (*needs.has, *needs.may), function):
            yield f"it binds {name} to something else"
    for expression in needs.confined:
        if strays(expression, (*needs.has, *needs.may), function):
            yield f"it also uses `{expression}` elsewhere"
    if needs.returns:
        returned = returns_only(needs.returns, function)
        if returned is not None:
            yield f"it returns {returned if len(returned) < 80 else returned[:77] + '...'}"
