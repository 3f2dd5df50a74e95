"""Fingerprints: one short string for the body of a function, class or name.

shim walks the syntax tree itself, because ast.dump prints different text on different Python versions. The walk covers
decorators, defaults, annotations, and the guards (``if``, ``try``) around every definition of the name. It leaves out
docstrings, comments and positions.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache

from shim._errors import SourceError
from shim._releases.sources import Sources

__all__ = [
    "ABSENT",
    "Definition",
    "absolute_origin",
    "blocks",
    "definitions",
    "fingerprint",
    "fingerprint_of",
    "names_bound_by",
    "outline",
    "signature_part",
    "split_target",
]

# Fields that mean nothing to the program, or that Python versions fill differently.
SKIPPED_FIELDS = frozenset({"ctx", "kind", "type_comment", "type_ignores"})

ABSENT = "absent"  # the fingerprint of a missing name, for a target that a patch adds

Guard = tuple[str, object]
FunctionNode = (ast.FunctionDef, ast.AsyncFunctionDef)


class Definition:
    """One place that gives a qualified name its value: the node, and the guards around it."""

    def __init__(self, node: ast.stmt, guards: tuple[Guard, ...]) -> None:
        self.node = node
        self.guards = guards

    @property
    def lines(self) -> tuple[int, int]:
        """First (decorators included) and last line."""
        first = min([self.node.lineno, *(d.lineno for d in getattr(self.node, "decorator_list", ()))])
        return first, self.node.end_lineno or first

    @property
    def decorated(self) -> bool:
        return bool(getattr(self.node, "decorator_list", ()))


@lru_cache(maxsize=4096)
def split_target(target: str) -> tuple[str, str]:
    """``"package.module:Class.attr"`` -> ``("package.module", "Class.attr")``. SourceError for any other form."""
    module, colon, qualname = target.partition(":")
    parts = [*module.split("."), *qualname.split(".")]
    if not colon or not all(part.isidentifier() for part in parts):
        raise SourceError(f"{target!r} is not of the form package.module:Qualified.name")
    return module, qualname


def blocks(statement: ast.stmt) -> Iterator[tuple[Guard, Sequence[ast.stmt]]]:
    """The blocks of a compound statement that opens no scope, each with its guard."""
    if isinstance(statement, ast.If):
        yield ("if", statement.test), statement.body
        yield ("else", statement.test), statement.orelse
    elif isinstance(statement, ast.Try) or type(statement).__name__ == "TryStar":
        yield ("try", None), statement.body  # type: ignore[attr-defined]
        for handler in statement.handlers:  # type: ignore[attr-defined]
            yield ("except", handler.type), handler.body
        yield ("try-else", None), statement.orelse  # type: ignore[attr-defined]
        yield ("finally", None), statement.finalbody  # type: ignore[attr-defined]
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        yield ("with", ast.Tuple(elts=[item.context_expr for item in statement.items])), statement.body
    elif isinstance(statement, (ast.For, ast.AsyncFor)):
        yield ("for", statement.iter), statement.body
        yield ("for-else", statement.iter), statement.orelse
    elif isinstance(statement, ast.While):
        yield ("while", statement.test), statement.body
        yield ("while-else", statement.test), statement.orelse
    elif isinstance(statement, ast.Match):
        for case in statement.cases:
            yield ("case", [statement.subject, case.pattern, case.guard]), case.body


def names_bound_by(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement itself binds. Names bound in its blocks do not count."""
    if isinstance(statement, (*FunctionNode, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _find(body: Sequence[ast.stmt], name: str, guards: tuple[Guard, ...]) -> Iterator[Definition]:
    for statement in body:
        if name in names_bound_by(statement):
            yield Definition(statement, guards)
        for guard, block in blocks(statement):
            yield from _find(block, name, (*guards, guard))


def definitions(tree: ast.Module, qualname: str) -> list[Definition]:
    """All definitions of `qualname`, in source order."""
    scopes: list[tuple[Sequence[ast.stmt], tuple[Guard, ...]]] = [(tree.body, ())]
    found: list[Definition] = []
    for name in qualname.split("."):
        found = [definition for body, guards in scopes for definition in _find(body, name, guards)]
        scopes = [(d.node.body, d.guards) for d in found if isinstance(d.node, ast.ClassDef)]
    return found


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body


def _joined(values: list[ast.expr]) -> list[object]:
    """The parts of an f-string, with neighbouring text merged and empty text dropped. Python versions differ there."""
    parts: list[object] = []
    for value in values:
        if isinstance(value, ast.Constant):
            text = str(value.value)
            if parts and isinstance(parts[-1], str):
                parts[-1] += text
            elif text:
                parts.append(text)
        else:
            parts.append(value)
    return parts


def _constant(value: object) -> str:
    # ascii(), because repr() prints more characters with each Unicode version. hex(), because it has no digit limit.
    text = hex(value) if type(value) is int else ascii(value)
    return f"{type(value).__name__}:{text}"


def _canonical(value: object) -> Iterator[str]:
    if isinstance(value, ast.Constant):
        yield _constant(value.value)
    elif isinstance(value, ast.AST):
        yield "(" + type(value).__name__
        for field in value._fields:
            content = getattr(value, field, None)
            if field in SKIPPED_FIELDS or content is None or content == []:
                continue
            if field == "body" and isinstance(value, (*FunctionNode, ast.ClassDef, ast.Module)):
                content = _without_docstring(content)
            elif field == "values" and isinstance(value, ast.JoinedStr):
                content = _joined(content)
            yield " " + field + "="
            yield from _canonical(content)
        yield ")"
    elif isinstance(value, (list, tuple)):
        yield "["
        for item in value:
            yield from _canonical(item)
            yield ","
        yield "]"
    else:
        yield _constant(value)


def _digest(value: object, length: int) -> str:
    text = "".join(_canonical(value)).encode("ascii", "backslashreplace")
    return hashlib.sha256(text).hexdigest()[:length]


def _import_of(node: ast.Import | ast.ImportFrom, name: str) -> list[object]:
    """Only the alias that binds `name`. Other names of the same statement do not matter."""
    aliases = [a for a in node.names if (a.asname or a.name.partition(".")[0]) == name]
    return [getattr(node, "module", None) or "", getattr(node, "level", 0), aliases]


def _parameters(node: ast.stmt) -> object:
    """Names, kinds and defaults of the parameters, without annotations, which do not restrict calls."""
    if not isinstance(node, FunctionNode):
        return None
    a = node.args
    groups = [a.posonlyargs, a.args, [a.vararg] if a.vararg else [], a.kwonlyargs, [a.kwarg] if a.kwarg else []]
    return [[[parameter.arg for parameter in group] for group in groups], a.defaults, list(a.kw_defaults)]


def fingerprint_of(found: Sequence[Definition], qualname: str) -> str:
    """``"<body>.<signature>"``: 16 and 8 hexadecimal digits. The signature of anything but a function is ``-``."""
    name = qualname.rpartition(".")[2]
    bodies: list[object] = []
    for definition in found:
        node: object = definition.node
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            node = _import_of(node, name)
        bodies.append([[list(guard) for guard in definition.guards], node])
    parameters = [_parameters(definition.node) for definition in found]
    if all(part is None for part in parameters):
        return f"{_digest(bodies, 16)}.-"
    return f"{_digest(bodies, 16)}.{_digest(parameters[0] if len(parameters) == 1 else parameters, 8)}"


def signature_part(value: str) -> str:
    """The part of a fingerprint that stands for the signature."""
    return value.rpartition(".")[2]


def fingerprint(sources: Sources, target: str, inherits: str | None = None, may_be_missing: bool = False) -> str:
    """Fingerprint of ``"package.module:Qualified.name"``. SourceError if it is missing or cannot be read.

    inherits: the definition that a class inherits under the name `target`. The fingerprint is that of `inherits`.
        SourceError if the class defines the name itself.
    may_be_missing: the name may be missing from its module or class. The fingerprint is then ABSENT.
    """
    modules = [split_target(name)[0] for name in (target, inherits) if name is not None]
    key = (target, inherits, may_be_missing)
    return sources.remembered(key, modules, lambda: _fingerprint(sources, target, inherits, may_be_missing))


def absolute_origin(sources: Sources, module: str, node: ast.ImportFrom) -> str | None:
    """The absolute name of the module that an import statement in `module` imports from."""
    if not node.level:
        return node.module
    path = sources.path(module) or ""
    parts = module.split(".") if path.endswith("__init__.py") else module.split(".")[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *filter(None, [node.module])]) or None


def outline(sources: Sources, module: str, qualname: str) -> list[Definition]:
    """The definitions of a name without their contents: kinds, places, decorators. SourceError as for trees."""
    return sources.remembered(
        (module, qualname), [module], lambda: _outlined(definitions(sources.tree(module), qualname))
    )


def _outlined(found: Sequence[Definition]) -> list[Definition]:
    outlined = []
    for definition in found:
        node = copy.copy(definition.node)
        for field in ("body", "args", "value"):
            if field in node._fields:
                setattr(node, field, [])
        outlined.append(Definition(node, ()))
    return outlined


def _fingerprint(sources: Sources, target: str, inherits: str | None, may_be_missing: bool) -> str:
    try:
        if inherits is not None:
            _still_inherited(sources, target, inherits)
        module, qualname = split_target(inherits or target)
        known = sources.known(module, qualname, may_be_missing) if inherits is None else None
        if known is not None:
            return known
        found = definitions(sources.tree(module), qualname)
        owner = qualname.rpartition(".")[0]
        if not found and may_be_missing and (not owner or definitions(sources.tree(module), owner)):
            return ABSENT
        if not found:
            raise SourceError(f"{module} has no {qualname}", "missing")
        outline(sources, module, qualname)  # remembered now, while the tree is parsed: binding needs it
        return fingerprint_of(found, qualname)
    except RecursionError:
        raise SourceError(f"{target} is nested too deeply to be read", "damaged") from None


def _still_inherited(sources: Sources, target: str, inherits: str) -> None:
    module, qualname = split_target(target)
    tree, owner = sources.tree(module), qualname.rpartition(".")[0]
    if not owner or not definitions(tree, owner):
        raise SourceError(f"{module} has no class {owner or qualname}", "missing")
    if definitions(tree, qualname):
        what = f"{owner} now defines {qualname}, and no longer inherits {inherits}"
        raise SourceError(what, "changed")
