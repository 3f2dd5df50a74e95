"""The order of imports between the parts of shim, and files that can be read in one sitting."""

import ast
import functools
import re
from graphlib import TopologicalSorter

from unit_helpers import REPOSITORY

# Each part with those it may import, besides itself, also inside a function. What only a type checker reads is free.
MAY_IMPORT = {
    "_printing": {"_record"},
    "_errors": {"_printing"},
    "_record": set(),
    "_version": set(),
    "_resources": set(),
    "_threads": set(),
    "_torch_names": set(),
    "_compatible": {"_errors", "_version"},
    "ops": {"_errors", "_threads", "_torch_names"},
    "_config_override": {"_errors", "_threads"},
    "_offload": {"_errors"},
    "_releases": {"_errors", "_threads", "_printing", "_record"},
    "_matrix": {"_errors", "_printing", "_record", "_releases"},
    "_configs": {"_errors", "_matrix"},
    "_planning": {"_errors", "_printing", "_record", "_version", "_releases", "_matrix", "_configs"},
    "_archives": {"_errors", "_printing", "_record", "_releases"},
    "_te": {"_errors", "_record", "_releases", "_planning"},
    "_engine": {
        "_errors",
        "_version",
        "_printing",
        "_record",
        "_threads",
        "_resources",
        "_compatible",
        "_torch_names",
        "_releases",
        "_matrix",
        "_configs",
        "_planning",
    },
    "_api": {"_errors", "_printing", "_record", "_releases", "_matrix", "_planning", "_te", "_engine"},
    "_workers": {"_errors", "_planning", "_api"},
    "testing": {"_errors", "_archives", "_torch_names", "_releases", "_matrix", "_planning", "_engine", "_api", "ops"},
    "_proving": {
        "_errors",
        "_printing",
        "_torch_names",
        "_releases",
        "_matrix",
        "_planning",
        "_engine",
        "_api",
        "testing",
    },
    "_tools": {
        "_archives",
        "_errors",
        "_printing",
        "_record",
        "_version",
        "_releases",
        "_matrix",
        "_configs",
        "_planning",
        "_te",
        "_engine",
        "_api",
    }
    | {"_workers", "testing", "_proving"},
    "maintenance": {
        "_archives",
        "_errors",
        "_printing",
        "_record",
        "_torch_names",
        "_version",
        "_releases",
        "_matrix",
        "_configs",
        "_planning",
        "_te",
        "_engine",
        "testing",
        "_proving",
        "_tools",
    },
    "patches": {"_errors", "_resources", "_threads", "_torch_names", "_config_override", "_offload", "ops"},
}
FILES = {
    ".".join(["shim", *file.relative_to(top).with_suffix("").parts]).removesuffix(".__init__"): file
    for top, folder in (
        (REPOSITORY / "shim", REPOSITORY / "shim"),
        (REPOSITORY, REPOSITORY / "patches"),
        (REPOSITORY, REPOSITORY / "maintenance"),
    )
    for file in folder.rglob("*.py")
    if "mutations" not in file.parts  # programs, which import each other as such
}


@functools.cache
def tree_of(file):
    return ast.parse(file.read_text("utf-8"))


def nodes_that_run(node):
    """All below `node` but what stands behind `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING"):
            yield child
            yield from nodes_that_run(child)


def imports_of(module, nodes=nodes_that_run):
    """The modules of shim that `module` imports, wherever in its text."""
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes(tree_of(FILES[module])):
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


def of_proofs(module):
    """Whether it is a file of proofs, or one that they share."""
    name = module.rpartition(".")[2]
    return module.startswith("shim.patches.") and (name in ("proof", "gpu_proof") or name.startswith("_proof_"))


def test_imports_run_one_way():
    odd = [
        f"{module} imports {name}"
        for module in FILES
        for name in imports_of(module)
        if part(module) in MAY_IMPORT
        and part(name) not in {part(module), "", *MAY_IMPORT[part(module)]}
        and not (of_proofs(module) and part(name) == "testing")  # a proof runs real models
    ]
    assert not odd, "\n".join(odd)


def test_what_no_wheel_has_is_reached_from_one_place():
    """Which says what a command needs, if shim runs from a wheel."""
    package = REPOSITORY / "shim"
    reaching = [file for file in package.rglob("*.py") if "shim.maintenance" in file.read_text("utf-8")]
    assert reaching == [package / "_tools" / "checkout.py"]


def test_every_part_has_its_place():
    assert {part(module) for module in FILES} == {"", "__main__", *MAY_IMPORT}


def test_no_module_imports_itself_by_way_of_others():
    """Raises CycleError, which names the modules. The public names in shim/__init__ are resolved on use."""
    TopologicalSorter({module: set(imports_of(module)) - {"shim"} for module in FILES if module != "shim"}).prepare()


def test_no_module_of_the_engine_needs_itself_for_its_types_either():
    room = [module for module in FILES if module.startswith("shim._engine.")]
    TopologicalSorter({module: set(imports_of(module, ast.walk)) & set(room) for module in room}).prepare()


def test_no_patch_imports_another():
    """What several patches need lies beside them, such as patches/_arguments.py, and what several proofs need too."""

    def folder(module):
        parts = module.split(".")[2:4] if module.startswith("shim.patches.") else []
        return ".".join(parts) if len(parts) == 2 and not parts[1].startswith("_") else None

    patches = [module for module in FILES if folder(module)]
    odd = [
        (module, name)
        for module in patches
        for name in imports_of(module)
        if folder(name) not in {None, folder(module)}
    ]
    helpers = [module for module in FILES if module.startswith("shim.patches.") and not folder(module)]
    odd += [(module, name) for module in helpers for name in imports_of(module) if folder(name)]
    plain = [module for module in FILES if module.startswith("shim.patches.") and not of_proofs(module)]
    odd += [(module, name) for module in plain for name in imports_of(module) if of_proofs(name)]
    assert len(patches) > 67 and len(helpers) > 10
    assert odd == []


LONGEST = 600  # lines
TESTS = REPOSITORY / "tests"


def test_no_file_is_too_long_to_be_read():
    tops = ("shim", "patches", "maintenance", "tests", "benchmarks", "examples")
    files = [file for top in tops for file in (REPOSITORY / top).rglob("*.py")]
    lengths = {str(file.relative_to(REPOSITORY)): len(file.read_text("utf-8").splitlines()) for file in files}
    assert not {name: lines for name, lines in lengths.items() if lines > LONGEST}


def test_what_tests_share_lies_in_one_place():
    """In tests/support, which pytest puts on sys.path; no test does so by itself."""
    calls = [f"sys.path.{how}(" for how in ("insert", "append", "extend")]
    texts = {file: file.read_text("utf-8") for file in TESTS.rglob("*.py")}
    assert not [str(file) for file, text in texts.items() if any(call in text for call in calls)]


def test_recorded_measurements_name_no_path_of_a_machine():
    """A run that failed may leave a traceback in what it records."""
    files = [file for folder in ("docs", "maintenance/mutations") for file in (REPOSITORY / folder).glob("*.json")]
    files += (REPOSITORY / "patches").rglob("*.json")
    assert len(files) > 100
    assert [file.name for file in files if re.search(r'File \\"|/(home|root|work|tmp)/', file.read_text("utf-8"))] == []
