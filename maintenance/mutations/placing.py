"""Putting a mutated function in the place of upstream's, in a process that has the release loaded.

The function object stays, so that every alias of it is the mutant too; its code becomes that of the mutated source,
compiled with upstream's file name and lines, so that shim takes it for upstream's own.
"""

import ast
import copy
import sys
import types
from importlib import import_module

from mutants import COPY, Mutant

from shim._releases.fingerprint import definitions, split_target
from shim._releases.sources import Sources

__all__ = ["Mutated", "NotPlaced", "function_at", "place", "swapped"]


class NotPlaced(Exception):
    """The mutant cannot be put where the function is."""


class Mutated(Sources):
    """The sources of a release with one function changed, and its callers with it: what a contract is asked about."""

    def __init__(self, sources: Sources, body: str, mutant: Mutant) -> None:
        super().__init__(sources._roots)
        self._upstream, self._mutant, self.callers = sources, mutant, {}
        self._module, self._qualname = split_target(body)

    def tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            found = self._upstream.tree(module)
            if module == self._module:
                found = swapped(found, self._qualname, self._mutant.node)
            name = self._qualname.rpartition(".")[2]
            # Nothing in a caller's text shows that torch calls what it calls by these names.
            if self._mutant.told is not None and name not in ("forward", "backward") and not name.startswith("__"):
                tell = _Tell(name, *self._mutant.told)
                found = tell.visit(copy.deepcopy(found))
                self.callers[module] = [c for c in tell.callers if (module, c) != (self._module, self._qualname)]
            self._trees[module] = found
        return self._trees[module]


class _Tell(ast.NodeTransformer):
    """Has callers of `name` give a parameter by its new name, or one that is new (old is None)."""

    def __init__(self, name: str, old: str | None, new: str) -> None:
        self.name, self.old, self.new = name, old, new
        self.scope: tuple[str, ...] = ()
        self.callers: list[str] = []
        self._told = 0

    def _inside(self, node):
        outer, self.scope = self.scope, (*self.scope, node.name)
        before = self._told
        self.generic_visit(node)
        if isinstance(node, ast.FunctionDef) and self._told > before:
            self.callers.append(".".join(self.scope))
        self.scope = outer
        return node

    visit_FunctionDef = visit_ClassDef = _inside

    def visit_Call(self, node):
        self.generic_visit(node)
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", None)
        if called != self.name:
            return node
        if self.old is None and not any(isinstance(arg, ast.Starred) for arg in node.args):
            node.keywords.append(ast.keyword(self.new, ast.Constant(None)))
            self._told += 1
        for keyword in node.keywords:
            if self.old is not None and keyword.arg == self.old:
                keyword.arg = self.new
                self._told += 1
        return node


def swapped(tree: ast.Module, qualname: str, node: ast.FunctionDef) -> ast.Module:
    """A copy of the tree with `node` in the place of the only definition of `qualname`."""
    (found,) = definitions(tree, qualname)
    changed = copy.deepcopy(tree)
    (there,) = definitions(changed, qualname)
    for parent in ast.walk(changed):
        for _, block in ast.iter_fields(parent):
            if isinstance(block, list) and any(child is there.node for child in block):
                block[[child is there.node for child in block].index(True)] = node
                # Lines that are not the definition's own would be those of somebody else's function.
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                ast.increment_lineno(node, found.lines[0] - first)
                node.end_lineno = found.node.end_lineno
                return changed
    raise NotPlaced(qualname)


def function_at(body: str) -> types.FunctionType:
    """The plain function that a module has as `body`, beneath decorators that keep it."""
    module, qualname = split_target(body)
    owner, _, name = qualname.rpartition(".")
    found = import_module(module)
    for part in filter(None, owner.split(".")):
        found = getattr(found, part)
    value = vars(found)[name]
    while True:
        code = getattr(value, "__code__", None)
        if isinstance(value, types.FunctionType) and code.co_qualname == qualname:
            return value
        inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "__wrapped__", None)
        if inner is None:
            raise NotPlaced(f"{body} is {type(value).__name__}")
        value = inner


def _code(tree: ast.Module, path: str, qualname: str) -> types.CodeType:
    found = []

    def look(code: types.CodeType) -> None:
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                if constant.co_qualname == qualname:
                    found.append(constant)
                look(constant)

    ast.fix_missing_locations(tree)
    look(compile(tree, path, "exec", dont_inherit=True))
    if len(found) != 1:
        raise NotPlaced(f"{len(found)} definitions of {qualname}")
    return found[0]


def _defaults(function: types.FunctionType, node: ast.FunctionDef) -> tuple[tuple | None, dict | None]:
    """Those of the mutant: upstream's values by name, and what mutants bring."""
    named = function.__code__.co_varnames[: function.__code__.co_argcount]
    old = dict(zip(reversed(named), reversed(function.__defaults__ or ())))
    old |= function.__kwdefaults__ or {}

    def value(parameter: ast.arg, default: ast.expr) -> object:
        name = parameter.arg
        for known in old:
            if name == known or name.startswith(f"{known}_added"):
                return old[known]
        return ast.literal_eval(default)

    a = node.args
    places = [*a.posonlyargs, *a.args][-len(a.defaults) :] if a.defaults else []
    positional = tuple(value(p, d) for p, d in zip(places, a.defaults))
    keywords = {p.arg: value(p, d) for p, d in zip(a.kwonlyargs, a.kw_defaults) if d is not None}
    return positional or None, keywords or None


def place(sources: Sources, body: str, mutant: Mutant) -> None:
    """Have the loaded release run `mutant` as `body`, and its callers give parameters by their new names."""
    module, qualname = split_target(body)
    mutated = Mutated(sources, body, mutant)
    function = function_at(body)
    code = _code(mutated.tree(module), function.__code__.co_filename, qualname)
    _copies(function, mutant, qualname)
    if code.co_freevars != function.__code__.co_freevars:
        raise NotPlaced(f"{qualname} closes over other names")
    defaults = _defaults(function, mutant.node)
    function.__code__, (function.__defaults__, function.__kwdefaults__) = code, defaults
    if mutant.told is not None:
        _tell_callers(mutated, qualname.rpartition(".")[2])


def _copies(function: types.FunctionType, mutant: Mutant, qualname: str) -> None:
    for text in mutant.copies:
        *path, name = text.split(".")
        plain = name.removesuffix(COPY)
        if path[:1] in (["self"], ["cls"], ["ctx"]):
            if len(path) > 1:
                raise NotPlaced(f"{text} is no function of a module or class")
            owner = import_module(function.__module__)
            for part in qualname.split(".")[:-1]:
                owner = getattr(owner, part)
            value = next((vars(c)[plain] for c in owner.__mro__ if plain in vars(c)), None)
        else:
            owner = function.__globals__
            for part in path:
                owner = owner.get(part) if isinstance(owner, dict) else getattr(owner, part, None)
            value = owner.get(plain) if isinstance(owner, dict) else getattr(owner, plain, None)
        if not isinstance(value, types.FunctionType) or not value.__module__.startswith(("megatron", "transformer_")):
            raise NotPlaced(f"{text} is no function of the release")
        twin = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, value.__closure__
        )
        twin.__kwdefaults__, twin.__module__ = value.__kwdefaults__, value.__module__
        twin.__qualname__ = value.__qualname__ + COPY
        if isinstance(owner, dict):
            owner[name] = twin
        else:
            setattr(owner, name, twin)


def _tell_callers(mutated: Mutated, name: str) -> None:
    for module, loaded in list(sys.modules.items()):
        path = getattr(loaded, "__file__", None) or ""
        if not module.startswith(("megatron.core.", "transformer_engine.")) or not path.endswith(".py"):
            continue
        if f"{name}(" not in mutated.text(module):
            continue
        tree = mutated.tree(module)
        for caller in mutated.callers.get(module, ()):
            try:
                function = function_at(f"{module}:{caller}")
                code = _code(tree, function.__code__.co_filename, caller)
            except (NotPlaced, KeyError, AttributeError):
                continue  # a function inside another, which is told with it
            if code.co_freevars == function.__code__.co_freevars:
                function.__code__ = code
