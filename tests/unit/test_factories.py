"""What factories do under the engine's lock, read from the sources of all patches, for all variants."""

import ast

import pytest
from unit_helpers import REPOSITORY

PATCHES = REPOSITORY / "patches"
IMPORTING = ("import_module", "__import__", "find_spec", "reload")


def module_of(path):
    parts = path.relative_to(PATCHES).with_suffix("").parts
    return ".".join(["shim", "patches", *(part for part in parts if part != "__init__")])


TREES = {module_of(path): ast.parse(path.read_text("utf-8")) for path in PATCHES.rglob("*.py")}
WITH_FACTORIES = sorted(m for m, t in TREES.items() if any(getattr(n, "name", "") == "bindings" for n in t.body))


def own(function):
    """The nodes that run when `function` does: not what is in functions defined in it, which run at call time."""
    left = list(function.body)
    while left:
        node = left.pop()
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
            left += ast.iter_child_nodes(node)


def defined(module):
    """Name -> (module, function) of what a patch module defines at its top, or takes from another patch module."""
    found = {n.name: (module, n) for n in TREES[module].body if isinstance(n, ast.FunctionDef)}
    for node in TREES[module].body:
        if isinstance(node, ast.ImportFrom) and node.module in TREES:
            there = {n.name: n for n in TREES[node.module].body if isinstance(n, ast.FunctionDef)}
            found |= {a.asname or a.name: (node.module, there[a.name]) for a in node.names if a.name in there}
    return found


def factory_code(module):
    """All functions that run while the factories of a module do, with what they call and hand around."""
    top = [n for n in TREES[module].body if not isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    names = {n.id for statement in top for n in ast.walk(statement) if isinstance(n, ast.Name)} | {"bindings"}
    left = [defined(module)[name] for name in names if name in defined(module)]
    seen = []
    while left:
        home, function = left.pop()
        if function not in seen:
            seen.append(function)
            used = {n.id for n in own(function) if isinstance(n, ast.Name)}
            left += [defined(home)[name] for name in used if name in defined(home)]
    return seen


def test_all_patches_are_looked_at():
    """Factories are found where patches keep them: in dictionaries at the top, and in bindings()."""
    assert {"rope_fusion", "te_moved_symbols", "paged_stash"} <= {m.rpartition(".")[2] for m in WITH_FACTORIES}
    found = {function.name for module in WITH_FACTORIES for function in factory_code(module)}
    assert {"_apply_rotary_pos_emb", "_cp_size", "argument", "checkpointed_forward", "_general_gemm"} <= found
    assert "_random_state" not in found  # which runs at call time, and imports


@pytest.mark.parametrize("module", WITH_FACTORIES)
def test_no_factory_imports(module):
    """They run under the engine's lock, for which another thread may wait that holds an import's."""
    importing = []
    for function in factory_code(module):
        for node in own(function):
            called = getattr(node, "func", None)
            name = getattr(called, "attr", None) or getattr(called, "id", None)
            if isinstance(node, (ast.Import, ast.ImportFrom)) or name in IMPORTING:
                importing.append(f"{function.name}:{node.lineno}")
    assert importing == []


def test_the_matrix_lists_what_each_probe_tries():
    """A patch that can try a replaced method says so in the matrix: a plan loads no patch module to find out."""
    from shim._matrix.load import load_matrix

    patches = load_matrix().patches.values()
    having = {entry.id for entry in patches if "probe" in defined(entry.module) or _takes_its_probe(entry.module)}
    assert having == {entry.id for entry in patches if entry.probe}


def _takes_its_probe(module):
    return any(
        alias.asname == "probe"
        for node in TREES[module].body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )
