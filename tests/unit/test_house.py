"""The order of imports between the parts of shim, and no circle among its modules."""

import ast
from graphlib import TopologicalSorter

from unit_helpers import REPOSITORY

# Each part with those it may import, besides itself, also inside a function. What only a type checker reads is free.
MAY_IMPORT = {
    "_errors": set(),
    "_record": set(),
    "_tasks": set(),
    "_kept": set(),
    "ops": {"_errors"},
    "_config_override": {"_errors", "_tasks"},
    "_releases": {"_errors", "_record"},
    "_matrix": {"_errors", "_record", "_releases"},
    "_planning": {"_errors", "_record", "_releases", "_matrix"},
    "_te": {"_errors", "_record", "_releases", "_planning"},
    "_engine": {"_errors", "_record", "_tasks", "_kept", "_releases", "_matrix", "_planning"},
    "_api": {"_errors", "_record", "_releases", "_matrix", "_planning", "_te", "_engine"},
    "_workers": {"_errors", "_planning", "_api"},
    "testing": {"_errors", "_releases", "_matrix", "_planning", "_engine", "_api", "ops"},
    "_tools": {"_errors", "_record", "_releases", "_matrix", "_planning", "_te", "_engine", "_api"}
    | {"_workers", "testing"},
    "patches": {"_errors", "_kept", "_config_override", "ops"},
}
FILES = {
    ".".join(["shim", *file.relative_to(top).with_suffix("").parts]).removesuffix(".__init__"): file
    for top in (REPOSITORY / "shim", REPOSITORY)
    for file in (top.rglob("*.py") if top.name == "shim" else (top / "patches").rglob("*.py"))
}


def nodes_that_run(node):
    """All below `node` but what stands behind `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING"):
            yield child
            yield from nodes_that_run(child)


def imports_of(module):
    """The modules of shim that `module` imports, wherever in its text."""
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes_that_run(ast.parse(FILES[module].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in FILES else base for alias in node.names]
        else:
            continue
        yield from (name for name in found if name in FILES and name != module)


def part(module):
    return module.split(".")[1] if "." in module else ""


def test_imports_run_one_way():
    odd = [
        f"{module} imports {name}"
        for module in FILES
        for name in imports_of(module)
        if part(module) in MAY_IMPORT and part(name) not in {part(module), "", *MAY_IMPORT[part(module)]}
    ]
    assert not odd, "\n".join(odd)


def test_every_part_has_its_place():
    assert {part(module) for module in FILES} == {"", "__main__", *MAY_IMPORT}


def test_no_module_imports_itself_by_way_of_others():
    """Raises CycleError, which names the modules. The public names in shim/__init__ are resolved on use."""
    TopologicalSorter({module: set(imports_of(module)) - {"shim"} for module in FILES if module != "shim"}).prepare()
