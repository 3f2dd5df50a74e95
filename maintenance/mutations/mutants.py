"""Mutants of a function: what a later release may do to it, one small change of its syntax tree at a time.

The order and the names of the mutants depend on the function alone.
"""

import ast
import copy
import functools
import itertools
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

__all__ = ["KINDS", "OWN", "Mutant", "change_attribute", "generate"]

ADDED = "added_later"  # the name of parameters and locals that mutants bring
OWN = ("self", "cls", "ctx")  # first parameters that nobody renames
COPY = "_of_later"  # what the name of a copied function ends in


@dataclass
class Mutant:
    """A changed function. `copies`: names that the body calls now, each a copy of the function without the ending.

    told: (old, new) names of a parameter that callers give by keyword, None where it is added.
    """

    kind: str
    what: str
    node: ast.FunctionDef
    copies: tuple[str, ...] = ()
    told: tuple[str | None, str] | None = None

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.what}"

    @cached_property
    def text(self) -> str:
        return ast.unparse(self.node)


def _shown(node: ast.AST, width: int = 70) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= width else text[: width - 3] + "..."


def _numbered(mutants: Iterator[Mutant], original: str) -> Iterator[Mutant]:
    """Without those that change nothing; the second of a name gets a number."""
    seen: dict[str, int] = {}
    texts = {original}
    for mutant in mutants:
        ast.fix_missing_locations(mutant.node)
        if mutant.text in texts and not mutant.told:
            continue
        texts.add(mutant.text)
        seen[mutant.name] = number = seen.get(mutant.name, 0) + 1
        yield (
            mutant
            if number == 1
            else Mutant(mutant.kind, f"{mutant.what} ({number})", mutant.node, mutant.copies, mutant.told)
        )


def generate(function: ast.FunctionDef) -> Iterator[Mutant]:
    """All mutants of `function`, which stays as it is."""
    function = copy.deepcopy(function)
    first = function.body[0]
    if len(function.body) > 1 and isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        del function.body[0]  # the docstring
    yield from _numbered((mutant for maker in KINDS for mutant in maker(function)), ast.unparse(function))


def _nodes(function: ast.FunctionDef, kind: type | tuple[type, ...]) -> list[tuple[int, ast.AST]]:
    """(place in a walk, node): the place finds the same node in a copy."""
    return [(place, node) for place, node in enumerate(ast.walk(function)) if isinstance(node, kind)]


@functools.lru_cache(maxsize=1)
def _pickled(function: ast.FunctionDef) -> bytes:
    return pickle.dumps(function)


def _copy(function: ast.FunctionDef) -> ast.FunctionDef:
    return pickle.loads(_pickled(function))  # copy.deepcopy takes ten times as long


def _copy_with(function: ast.FunctionDef, place: int) -> tuple[ast.FunctionDef, ast.AST]:
    changed = _copy(function)
    return changed, next(itertools.islice(ast.walk(changed), place, None))


def _replaced(function: ast.FunctionDef, place: int, by: ast.AST) -> ast.FunctionDef:
    changed, node = _copy_with(function, place)

    class Replace(ast.NodeTransformer):
        def visit(self, found: ast.AST) -> ast.AST:
            return by if found is node else self.generic_visit(found)

    return Replace().visit(changed)


def _blocks(function: ast.FunctionDef) -> Iterator[tuple[int, str, list[ast.stmt]]]:
    for place, node in enumerate(ast.walk(function)):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield place, field, block


def _parameters(function: ast.FunctionDef) -> list[ast.arg]:
    a = function.args
    return [p for p in (*a.posonlyargs, *a.args, *a.kwonlyargs) if p.arg not in OWN]


def _rename(node: ast.AST, old: str, new: str) -> None:
    for found in ast.walk(node):
        if isinstance(found, ast.Name) and found.id == old:
            found.id = new
        elif isinstance(found, ast.arg) and found.arg == old:
            found.arg = new
        elif isinstance(found, ast.Nonlocal):
            found.names = [new if name == old else name for name in found.names]


def rename_parameter(function: ast.FunctionDef) -> Iterator[Mutant]:
    for parameter in _parameters(function):
        changed = _copy(function)
        new = f"{parameter.arg}_{ADDED}"
        _rename(changed, parameter.arg, new)
        yield Mutant("rename a parameter", parameter.arg, changed, told=(parameter.arg, new))
    for variadic, stars in ((function.args.vararg, "*"), (function.args.kwarg, "**")):
        if variadic is not None:
            changed = _copy(function)
            _rename(changed, variadic.arg, f"{variadic.arg}_{ADDED}")
            yield Mutant("rename a parameter", stars + variadic.arg, changed)


def add_parameter(function: ast.FunctionDef) -> Iterator[Mutant]:
    """Callers that know the function by name give the new parameter, as those of a later release would."""
    changed = _copy(function)
    a = changed.args
    if a.vararg is None and not a.kwonlyargs:
        a.args.append(ast.arg(ADDED))
        a.defaults.append(ast.Constant(None))
    else:
        a.kwonlyargs.append(ast.arg(ADDED))
        a.kw_defaults.append(ast.Constant(None))
    yield Mutant("add a parameter", "at the end", changed, told=(None, ADDED))


def swap_parameters(function: ast.FunctionDef) -> Iterator[Mutant]:
    names = [p.arg for p in function.args.args]
    required = len(names) - len(function.args.defaults)
    for i in range(len(names) - 1):
        if names[i] in OWN or (i < required <= i + 1):
            continue
        changed = _copy(function)
        args = changed.args.args
        args[i], args[i + 1] = args[i + 1], args[i]
        if i >= required:
            d, at = changed.args.defaults, i - required
            d[at], d[at + 1] = d[at + 1], d[at]
        yield Mutant("swap two parameters", f"{names[i]}, {names[i + 1]}", changed)


def drop_call(function: ast.FunctionDef) -> Iterator[Mutant]:
    """A call statement goes; of another call its first argument stays."""
    for place, node in _nodes(function, ast.Call):
        if node.args and not isinstance(node.args[0], ast.Starred):
            yield Mutant("drop a call", _shown(node), _replaced(function, place, copy.deepcopy(node.args[0])))
    for place, node in _nodes(function, ast.Expr):
        if isinstance(node.value, ast.Call):
            yield Mutant("drop a statement", _shown(node), _replaced(function, place, ast.Pass()))


def drop_block(function: ast.FunctionDef) -> Iterator[Mutant]:
    for place, node in _nodes(function, (ast.If, ast.AugAssign, ast.Delete, ast.Assert, ast.Assign)):
        # Without a local name that is read later, nothing runs at all.
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], (ast.Name, ast.Tuple)):
            yield Mutant("drop a statement", _shown(node), _replaced(function, place, ast.Pass()))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node.value)):
                yield Mutant("drop a statement", _shown(node), _replaced(function, place, ast.Pass()))


def change_attribute(function: ast.FunctionDef) -> Iterator[Mutant]:
    """Another attribute of the same object is read."""
    seen = set()
    for place, node in _nodes(function, ast.Attribute):
        text = ast.unparse(node)
        if isinstance(node.ctx, ast.Load) and text not in seen:
            seen.add(text)
            changed = _copy(function)
            for found in ast.walk(changed):
                if isinstance(found, ast.Attribute) and ast.unparse(found) == text:
                    found.attr += ADDED
            yield Mutant("read another attribute", _shown(node), changed)


def swap_statements(function: ast.FunctionDef) -> Iterator[Mutant]:
    for place, field, block in _blocks(function):
        for i in range(len(block) - 1):
            if isinstance(block[i + 1], (ast.Return, ast.Raise)):
                continue
            changed, node = _copy_with(function, place)
            body = getattr(node, field)
            body[i], body[i + 1] = body[i + 1], body[i]
            yield Mutant("swap two statements", f"{_shown(block[i], 40)} / {_shown(block[i + 1], 40)}", changed)


def change_return(function: ast.FunctionDef) -> Iterator[Mutant]:
    for place, node in _nodes(function, ast.Return):
        value = node.value
        if value is None:
            continue
        kind, said = "change a return", _shown(node)
        if isinstance(value, ast.Tuple) and len(value.elts) > 1:
            fewer = ast.Tuple(value.elts[:-1], ast.Load()) if len(value.elts) > 2 else value.elts[0]
            yield Mutant(kind, f"{said} without the last", _replaced(function, place, ast.Return(fewer)))
            turned = ast.Tuple([value.elts[1], value.elts[0], *value.elts[2:]], ast.Load())
            yield Mutant(kind, f"{said} in another order", _replaced(function, place, ast.Return(turned)))
        more = ast.Tuple([value, ast.Constant(None)], ast.Load())
        if isinstance(value, ast.Tuple):
            more = ast.Tuple([*value.elts, ast.Constant(None)], ast.Load())
        yield Mutant(kind, f"{said} and None", _replaced(function, place, ast.Return(more)))


def drop_returns(function: ast.FunctionDef) -> Iterator[Mutant]:
    changed = _copy(function)

    class Drop(ast.NodeTransformer):
        def visit_Return(self, node: ast.Return) -> ast.stmt:
            return ast.Expr(node.value) if node.value is not None else ast.Pass()

        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
            return node if node is not changed else self.generic_visit(node)

    yield Mutant("change a return", "none at all", Drop().visit(changed))


def drop_keyword(function: ast.FunctionDef) -> Iterator[Mutant]:
    for place, node in _nodes(function, ast.Call):
        for i, keyword in enumerate(node.keywords):
            if keyword.arg is None:
                continue
            changed, call = _copy_with(function, place)
            del call.keywords[i]
            yield Mutant("drop a keyword", f"{keyword.arg} of {_shown(node.func)}", changed)


def negate(function: ast.FunctionDef) -> Iterator[Mutant]:
    for place, node in _nodes(function, (ast.If, ast.IfExp)):
        changed, found = _copy_with(function, place)
        found.test = ast.UnaryOp(ast.Not(), found.test)
        yield Mutant("negate a condition", _shown(node.test), changed)


def change_constant(function: ast.FunctionDef) -> Iterator[Mutant]:
    for place, node in _nodes(function, ast.Constant):
        if node.value is None or not isinstance(node.value, (bool, int, float)):
            continue
        other = (not node.value) if isinstance(node.value, bool) else node.value + 1
        yield Mutant("change a constant", f"{node.value} at {place}", _replaced(function, place, ast.Constant(other)))


def wrap_body(function: ast.FunctionDef) -> Iterator[Mutant]:
    """As releases do for profilers, and to leave a function early."""
    changed = _copy(function)
    region = ast.parse("__import__('torch').profiler.record_function('later')", mode="eval").body
    changed.body = [ast.With([ast.withitem(region)], changed.body)]
    yield Mutant("wrap the body", "in a region of the profiler", changed)
    changed = _copy(function)
    inner = ast.parse("def inner():\n    pass").body[0]
    inner.body = changed.body
    stores = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if not stores & {p.arg for p in ast.walk(function.args) if isinstance(p, ast.arg)} and "super" not in ast.unparse(
        function
    ):
        changed.body = [inner, ast.Return(ast.Call(ast.Name("inner", ast.Load()), [], []))]
        yield Mutant("wrap the body", "in a function that it calls", changed)
    changed = _copy(function)
    region = ast.parse("__import__('torch').no_grad()", mode="eval").body
    changed.body = [ast.With([ast.withitem(region)], changed.body)]
    yield Mutant("wrap the body", "in torch.no_grad()", changed)


def leave_with(function: ast.FunctionDef) -> Iterator[Mutant]:
    """A statement moves out of its `with`."""
    for place, field, block in _blocks(function):
        for i, statement in enumerate(block):
            if not isinstance(statement, ast.With):
                continue
            for what, keep in (("all", 0), ("the last", -1)):
                if keep and len(statement.body) < 2:
                    continue
                changed, node = _copy_with(function, place)
                body = getattr(node, field)
                inside = body[i].body
                if keep:
                    body[i + 1 : i + 1] = inside[keep:]
                    del inside[keep:]
                else:
                    body[i : i + 1] = inside
                head = ", ".join(_shown(item) for item in statement.items)
                yield Mutant("move out of a with", f"{what} of {head}", changed)


def call_copy(function: ast.FunctionDef) -> Iterator[Mutant]:
    """The body calls another function, which does the same: what patches the first one is not reached."""
    seen = set()
    for _, node in _nodes(function, ast.Call):
        text = ast.unparse(node.func)
        if text in seen or not isinstance(node.func, (ast.Name, ast.Attribute)):
            continue
        root = node.func
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name) or text.startswith("torch."):
            continue
        seen.add(text)
        changed = _copy(function)
        for found in ast.walk(changed):
            if isinstance(found, ast.Call) and ast.unparse(found.func) == text:
                if isinstance(found.func, ast.Name):
                    found.func.id += COPY
                else:
                    found.func.attr += COPY
        yield Mutant("call a copy", text, changed, copies=(text + COPY,))


def rename_local(function: ast.FunctionDef) -> Iterator[Mutant]:
    """Nothing changes but a name inside."""
    parameters = {p.arg for p in ast.walk(function) if isinstance(p, ast.arg)}
    stores = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    outer = {name for n in ast.walk(function) if isinstance(n, (ast.Global, ast.Nonlocal)) for name in n.names}
    for name in sorted(stores - parameters - outer):
        changed = _copy(function)
        _rename(changed, name, f"{name}_{ADDED}")
        yield Mutant("rename a local", name, changed)


KINDS = (
    rename_parameter,
    add_parameter,
    swap_parameters,
    drop_call,
    drop_block,
    change_return,
    drop_returns,
    drop_keyword,
    negate,
    swap_statements,
    change_constant,
    wrap_body,
    leave_with,
    call_copy,
    rename_local,
)
