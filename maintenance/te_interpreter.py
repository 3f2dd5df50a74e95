"""The losses of a module of megatron-core with a TE release that lacks some names, read from the sources of both.

The interpreter follows a module statement by statement, as an import would run it. It decides gates on the version of
Transformer Engine. At a missing name it leaves the body of a try-statement for the handler, and compares what the
handler binds with what the body would have bound. It then follows the functions that exist, for the names that they
would read when called. It runs nothing. Where it cannot decide a condition, both branches count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from shim._errors import SourceError
from shim._releases.fingerprint import absolute_origin, blocks
from shim._releases.sources import Sources
from shim._te.names import TE_PACKAGE, Names, as_target, dotted

__all__ = ["TeRelease", "Loss", "Megatron", "Pair"]

# Fallbacks of megatron-core that are rarely installed. Counting them as there would hide what is lost without them.
ABSENT = frozenset({"amp_C", "apex"})
CATCH_ALL = frozenset({"Exception", "BaseException"})
CATCHES = {
    "ImportError": frozenset({"ImportError"}),
    "ModuleNotFoundError": frozenset({"ImportError", "ModuleNotFoundError"}),
    "AttributeError": frozenset({"AttributeError"}),
}
RAISES, LEAVES = "raises", "leaves"  # how a block ends before its last statement
TEXT_LIMIT = 60
HOPS = 2  # modules of megatron-core that pass a name on. No release has longer chains.


@dataclass(frozen=True)
class Loss:
    """A missing name, the module of megatron-core that wants it, and the consequence for that module."""

    name: str
    module: str
    what: str


@dataclass(frozen=True)
class Value:
    """The known facts about the object of a name, and the missing names that caused them."""

    kind: str  # te, constant, version, definition, import, other
    content: Any = None
    causes: frozenset[str] = frozenset()

    def is_like(self, other: Value) -> bool:
        return self.kind == other.kind and (self.kind == "te" or self.content == other.content)


UNKNOWN = Value("other", "...")


@dataclass
class TeRelease:
    """A TE release: its version, for gates, and its names."""

    version: Version
    sources: Sources
    _has: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._names = Names(self.sources)

    def has(self, name: str) -> bool:
        if name not in self._has:
            self._has[name] = self._names.has(name)
        return self._has[name]

    def has_module(self, module: str) -> bool:
        return module == TE_PACKAGE or self.sources.path(module) is not None


class Megatron:
    """The modules of a release of megatron-core whose text names Transformer Engine."""

    def __init__(self, sources: Sources, package: Path) -> None:
        self.sources = sources
        self.modules: dict[str, ast.Module] = {}
        for path in sorted(package.rglob("*.py")):
            parts = ["megatron", "core", *path.relative_to(package).with_suffix("").parts]
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            try:
                if TE_PACKAGE in sources.text(module):
                    self.modules[module] = sources.tree(module)
            except SourceError:
                continue  # a file that cannot be read tells nothing
        self._named: dict[int, frozenset[str]] = {}

    def names_in(self, node: ast.AST) -> frozenset[str]:
        """The names that a function reads, and "import" if it imports anything."""
        if id(node) not in self._named:
            found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            if any(isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.walk(node)):
                found.add("import")
            self._named[id(node)] = frozenset(found)
        return self._named[id(node)]


@dataclass
class Module:
    """The names of a module after its import (`scope`), and those it lacks because of missing names (`gone`)."""

    scope: dict[str, Value]
    gone: dict[str, frozenset[str]]


class Pair:
    """A release of megatron-core and a TE release."""

    def __init__(self, megatron: Megatron, te: TeRelease) -> None:
        self.megatron = megatron
        self.te = te
        self._modules: dict[str, Module] = {}
        self._losses: dict[Loss, None] = {}

    def losses(self) -> tuple[Loss, ...]:
        """Everything that is lost.

        Modules import from each other in cycles. So each pass follows all modules with the results of the pass before.
        """
        for last in (False,) * HOPS + (True,):
            self._losses = {}
            self._modules = {
                name: _Follower(self, name).follow(tree, functions=last) for name, tree in self.megatron.modules.items()
            }
        return tuple(self._losses)

    def module(self, name: str) -> Module | None:
        """The module after its import, as far as earlier passes know it."""
        return self._modules.get(name)

    def lose(self, causes: Iterable[str], module: str, what: str) -> None:
        self._losses |= {Loss(cause, module, what): None for cause in causes}


@dataclass
class _Missing:
    causes: frozenset[str]  # the missing names. Empty for another package, which does not count as a loss.
    error: str


@dataclass
class _Attempt:
    """A try-statement, module or function: what was missing in it, and the scope at the first missing name."""

    missing: list[_Missing] = field(default_factory=list)
    before: dict[str, Value] = field(default_factory=dict)
    waiting: int = 0


class _Follower:
    def __init__(self, pair: Pair, module: str) -> None:
        self.pair = pair
        self.name = module
        self.found = Module({}, {})
        self.scopes: list[dict[str, Value]] = [self.found.scope]  # the innermost last
        self.attempts: list[_Attempt] = []
        self.waiting: list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]] = []
        self.classes: list[str] = []
        self.function = ""
        self.raised = ""

    # A module, then its functions

    def follow(self, tree: ast.Module, functions: bool) -> Module:
        try:
            return self._follow(tree, functions)
        except RecursionError:  # expressions nested as no release nests them
            return Module({}, {})

    def _follow(self, tree: ast.Module, functions: bool) -> Module:
        self.attempts = [_Attempt()]
        self.run(tree.body)
        for missing in self.attempts[0].missing:
            self.pair.lose(missing.causes, self.name, f"its import raises {missing.error}")
        if functions:
            self._follow_functions()
        return self.found

    def _follow_functions(self) -> None:
        unbuilt: set[str] = set()
        for qualname, node in sorted(self.waiting, key=lambda item: item[1].name != "__init__"):
            owner = qualname.rpartition(".")[0]
            named = self.pair.megatron.names_in(node)
            reads = "import" in named or any(self._of_te(name) for name in named)
            if owner in unbuilt:
                continue  # __init__ refuses this TE release, so no method is ever called
            if not reads and "is_te_min_version" not in named:
                continue
            if self.follow_function(qualname, node) == RAISES and node.name == "__init__":
                unbuilt.add(owner)

    def _of_te(self, name: str) -> bool:
        value = self.found.scope.get(name)
        return value is not None and value.kind == "te"

    def follow_function(self, qualname: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        self.scopes = [self.found.scope, {a.arg: UNKNOWN for a in named if a is not None}]
        self.attempts, self.function = [_Attempt()], qualname
        end = self.run(node.body)
        for missing in self.attempts[0].missing:
            self.pair.lose(missing.causes, self.name, f"{qualname} raises {missing.error}")
        return end

    # Statements

    def run(self, body: Sequence[ast.stmt]) -> str:
        """Follow a block. Returns how it ends: "" at its last statement, else RAISES or LEAVES."""
        for statement in body:
            end = self.statement(statement)
            if end:
                return end
        return ""

    def statement(self, node: ast.stmt) -> str:
        follow = getattr(self, f"_{type(node).__name__.lower()}", None)
        if follow is not None:
            return follow(node) or ""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.read(child)
            elif isinstance(child, ast.withitem):
                self.read(child.context_expr)
        for _, block in blocks(node):
            self.run(block)  # whether a loop is entered or a case matches is not known
        return ""

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            if top == TE_PACKAGE:
                if not self.pair.te.has_module(alias.name):
                    self.miss(frozenset({as_target(alias.name.split("."))}), "ModuleNotFoundError")
                self.bind(alias.asname or top, Value("te", alias.name if alias.asname else top))
                continue
            if top in ABSENT:
                self.miss(frozenset(), "ModuleNotFoundError")
            self.bind(alias.asname or top, Value("import", alias.name))

    def _importfrom(self, node: ast.ImportFrom) -> None:
        origin = absolute_origin(self.pair.megatron.sources, self.name, node) or ""
        top = origin.partition(".")[0]
        if top in ABSENT:
            self.miss(frozenset(), "ModuleNotFoundError")
        provider = self.pair.module(origin) if top == "megatron" else None
        for alias in node.names:
            name = alias.asname or alias.name
            if top == TE_PACKAGE:
                target = f"{origin}:{alias.name}"
                if not self.pair.te.has(target):
                    there = self.pair.te.has_module(origin)
                    self.miss(frozenset({target}), "ImportError" if there else "ModuleNotFoundError")
                self.bind(name, Value("te", f"{origin}.{alias.name}"))
            elif provider is not None and alias.name in provider.gone:
                self.miss(provider.gone[alias.name], "ImportError")
                self.bind(name, Value("definition", name))
            elif provider is not None and alias.name in provider.scope:
                value = provider.scope[alias.name]
                self.bind(name, value)
                if value.causes and not self.function:
                    self.pair.lose(value.causes, self.name, _holds(name, value))
            else:
                self.bind(name, Value("import", f"{origin}.{alias.name}"))

    def _assign(self, node: ast.Assign) -> None:
        self.read(node.value)
        for target in node.targets:
            self._bind_target(target, node.value)

    def _annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.read(node.value)
            self._bind_target(node.target, node.value)

    def _bind_target(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.bind(target.id, self.value(value))
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
            for index, part in enumerate(target.elts):
                if len(parts) == len(target.elts):
                    self._bind_target(part, parts[index])
                elif isinstance(part, ast.Name):
                    self.bind(part.id, UNKNOWN)

    def _functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.read(part)
        self.bind(node.name, Value("definition", node.name))
        if self.function:
            self.run(node.body)  # a function within a function counts as called at its definition
        else:
            self.waiting.append((".".join([*self.classes, node.name]), node))

    _asyncfunctiondef = _functiondef

    def _classdef(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)):
            self.read(part)
        self.bind(node.name, Value("definition", node.name))
        self.scopes.append({})
        self.classes.append(node.name)
        self.run(node.body)
        self.classes.pop()
        self.scopes.pop()

    def _if(self, node: ast.If) -> str:
        self.read(node.test)
        known = self.truth(node.test)
        if known is not None:
            return self.run(node.body if known else node.orelse)
        before = dict(self.scopes[-1])
        end = self.run(node.body)
        one = self._put_back(before)
        other_end = self.run(node.orelse)
        if end and other_end:
            return end
        if other_end:
            self._put_back(one)
        elif not end:
            self._put_back(_merged(one, self.scopes[-1]))
        return ""

    def _put_back(self, scope: Mapping[str, Value]) -> dict[str, Value]:
        """Replace the content of the innermost scope. Returns the old content."""
        held = dict(self.scopes[-1])
        self.scopes[-1].clear()
        self.scopes[-1].update(scope)
        return held

    def _return(self, node: ast.Return) -> str:
        if node.value is not None:
            self.read(node.value)
        return LEAVES

    def _raise(self, node: ast.Raise) -> str:
        self.raised = next(iter(dotted(getattr(node.exc, "func", node.exc))[-1:]), "") if node.exc else ""
        return RAISES

    def _assert(self, node: ast.Assert) -> str:
        self.read(node.test)
        self.raised = "AssertionError"
        return RAISES if self.truth(node.test) is False else ""

    def _continue(self, node: ast.Continue | ast.Break) -> str:
        return LEAVES

    _break = _continue

    # Try-statements

    def _try(self, node: ast.Try) -> str:
        attempt = _Attempt(waiting=len(self.waiting))
        self.attempts.append(attempt)
        start = dict(self.scopes[-1])
        end = self.run(node.body) or self.run(node.orelse)
        self.attempts.pop()
        error = attempt.missing[0].error if attempt.missing else self.raised if end == RAISES else ""
        handler = next((h for h in node.handlers if _catches(h, error)), None) if error else None
        if handler is not None:
            end = self._handled(handler, attempt, start)
        elif attempt.missing:
            for missing in attempt.missing:
                self._missed(missing, attempt.before)
        return self.run(node.finalbody) or end

    _trystar = _try

    def _handled(self, handler: ast.ExceptHandler, attempt: _Attempt, start: Mapping[str, Value]) -> str:
        """The body fails: run the handler from the scope at that point, and compare what both bind."""
        if not attempt.missing:
            return self.run(handler.body)  # a gate has raised, so nothing is lost
        there = self._put_back(attempt.before)
        del self.waiting[attempt.waiting :]  # functions that the body would have defined
        end = self.run(handler.body)
        causes = frozenset().union(*(missing.causes for missing in attempt.missing))
        if not causes:
            return end
        wanted = {name: value for name, value in there.items() if start.get(name) is not value}
        if self.function:
            self._lost_in_function(wanted, causes, end)
        else:
            self._lost_in_module(wanted, causes)
        return end

    def _lost_in_function(self, wanted: Mapping[str, Value], causes: frozenset[str], end: str) -> None:
        scope = self.scopes[-1]
        of_te = [name for name, value in wanted.items() if value.kind == "te"]
        if not of_te or any(scope.get(name, UNKNOWN).kind != "te" for name in of_te):
            what = f"raises {self.raised or 'an error'}" if end == RAISES else "goes on without it"
            self.pair.lose(causes, self.name, f"{self.function} {what}")

    def _lost_in_module(self, wanted: Mapping[str, Value], causes: frozenset[str]) -> None:
        scope = self.scopes[-1]
        given: dict[str, str] = {}
        undefined: dict[str, str] = {}
        for name, value in wanted.items():
            held = scope.get(name)
            if held is None:
                if value.kind != "import":
                    self.found.gone[name] = causes
                    undefined[name] = f"{name} is undefined"
            elif not held.is_like(value):
                scope[name] = Value(held.kind, held.content, held.causes | causes)
                given[name] = _holds(name, scope[name])
        # The names that the handler sets are the best evidence of the loss, and a flag is better than the names.
        lost = given or undefined
        own = [what for name, what in lost.items() if wanted[name].kind != "te"]
        if lost and not own and not given and any(self._fell_back(name, wanted) for name in scope):
            return
        for what in own or lost.values():
            self.pair.lose(causes, self.name, what)

    def _fell_back(self, name: str, wanted: Mapping[str, Value]) -> bool:
        """Whether the name is bound to another object of Transformer Engine, which serves instead."""
        return name in wanted and self.scopes[-1][name].kind == wanted[name].kind == "te"

    def miss(self, causes: frozenset[str], error: str) -> None:
        self._missed(_Missing(causes, error), dict(self.scopes[-1]))

    def _missed(self, missing: _Missing, before: dict[str, Value]) -> None:
        """Note a missing name, and go on as if it were there, so that every missing name is found."""
        attempt = self.attempts[-1]
        if not attempt.missing:
            attempt.before = before
        attempt.missing.append(missing)

    # Expressions

    def bind(self, name: str, value: Value) -> None:
        self.scopes[-1][name] = value

    def look_up(self, name: str) -> Value:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), UNKNOWN)

    def read(self, node: ast.expr) -> None:
        """Look for missing names in an expression. Guards in the expression count."""
        if isinstance(node, ast.BoolOp):
            for part in node.values:
                self.read(part)
                if self.truth(part) is isinstance(node.op, ast.Or):
                    return
        elif isinstance(node, ast.IfExp):
            self.read(node.test)
            known = self.truth(node.test)
            for part, when in ((node.body, False), (node.orelse, True)):
                if known is not when:
                    self.read(part)
        elif isinstance(node, ast.Attribute) and self._target(node):
            target = self._target(node)
            if not self._there(target):
                self.miss(frozenset({target}), "AttributeError")
        else:
            for child in ast.iter_child_nodes(node):
                inner = isinstance(child, (ast.keyword, ast.comprehension))
                for found in ast.iter_child_nodes(child) if inner else (child,):
                    if isinstance(found, ast.expr):
                        self.read(found)

    def _there(self, target: str) -> bool:
        """Whether an attribute is there. A member of a missing class counts as there: the class itself was noted."""
        owner = target.rpartition(".")[0]
        return self.pair.te.has(target) or (":" in owner and not self.pair.te.has(owner))

    def _parts(self, node: ast.expr) -> list[str]:
        """The parts of an expression's dotted name, if it is one of Transformer Engine."""
        parts = dotted(node)
        if not parts:
            return []
        root = self.look_up(parts[0])
        return [*root.content.split("."), *parts[1:]] if root.kind == "te" else []

    def _target(self, node: ast.expr) -> str:
        parts = self._parts(node)
        return "" if len(parts) < 2 or parts[-1].startswith("__") else as_target(parts)

    def value(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Constant):
            return Value("constant", node.value)
        if isinstance(node, ast.Name):
            return self.look_up(node.id)
        parts = self._parts(node)
        if parts[-1:] == ["__version__"]:
            return Value("version", self.pair.te.version)
        if parts:
            return Value("te", ".".join(parts))
        if isinstance(node, ast.Call):
            known = self._called(node)
            if known is not None:
                return known
        return Value("other", node)

    def _called(self, node: ast.Call) -> Value | None:
        """The value of a call that gates are made of. None for any other call."""
        name = (dotted(node.func) or [""])[-1]
        first = self.value(node.args[0]) if node.args else UNKNOWN
        if name == "get_te_version":
            return Value("version", self.pair.te.version)
        if name == "is_te_min_version":
            wanted = _version(first)
            equal = next((k.value for k in node.keywords if k.arg == "check_equality"), ast.Constant(True))
            if wanted is None or not isinstance(equal, ast.Constant):
                return None
            mine = self.pair.te.version
            return Value("constant", mine >= wanted if equal.value else mine > wanted)
        if name in ("Version", "PkgVersion", "str") and first.kind in ("constant", "version"):
            found = _version(first)
            return None if found is None else Value("version", found)
        if name == "hasattr" and len(node.args) == 2 and isinstance(node.args[1], ast.Constant):
            parts = self._parts(node.args[0])
            if parts:
                attribute = str(node.args[1].value)
                there = attribute.startswith("__") or self.pair.te.has(as_target([*parts, attribute]))
                return Value("constant", there)
        return None

    def truth(self, node: ast.expr) -> bool | None:
        """Whether a condition holds. None if the sources do not tell."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            known = self.truth(node.operand)
            return None if known is None else not known
        if isinstance(node, ast.BoolOp):
            found = [self.truth(part) for part in node.values]
            decisive = isinstance(node.op, ast.Or)
            return decisive if decisive in found else None if None in found else not decisive
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._compared(self.value(node.left), node.ops[0], self.value(node.comparators[0]))
        if (dotted(node) or [""])[-1] == "TYPE_CHECKING":
            return False
        value = self.value(node)
        if value.kind == "constant":
            return bool(value.content)
        return True if value.kind in ("te", "definition") else None

    def _compared(self, left: Value, operator: ast.cmpop, right: Value) -> bool | None:
        if isinstance(operator, (ast.Is, ast.IsNot)) and right == Value("constant", None):
            if left.kind in ("constant", "te", "definition"):
                return (left.kind == "constant" and left.content is None) is isinstance(operator, ast.Is)
            return None
        if left.kind == right.kind == "version":
            mine, other = left.content, right.content
            known = {ast.Lt: mine < other, ast.LtE: mine <= other, ast.Gt: mine > other, ast.GtE: mine >= other}
            return (known | {ast.Eq: mine == other, ast.NotEq: mine != other}).get(type(operator))
        return None


def _merged(one: Mapping[str, Value], other: Mapping[str, Value]) -> dict[str, Value]:
    """The content of a scope after one of two branches, if it is not known which."""
    merged = {**one, **other}
    for name in one.keys() & other.keys():
        if not one[name].is_like(other[name]):
            of_te = [value for value in (one[name], other[name]) if value.kind == "te"]
            merged[name] = next(iter(of_te), UNKNOWN)
    return merged


def _catches(handler: ast.ExceptHandler, error: str) -> bool:
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {(dotted(type_) or [""])[-1] for type_ in types}
    return bool(names & (CATCHES.get(error, frozenset({error})) | CATCH_ALL))


def _version(value: Value) -> Version | None:
    if value.kind == "version":
        return value.content
    try:
        return Version(value.content) if isinstance(value.content, str) else None
    except InvalidVersion:
        return None


def _holds(name: str, value: Value) -> str:
    if value.kind == "constant":
        return f"{name}={value.content!r}"
    # Unparsed only here, because unparsing every assignment would take most of the time.
    text = ast.unparse(value.content) if isinstance(value.content, ast.AST) else str(value.content)
    return f"{name}={text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT] + '...'}"
