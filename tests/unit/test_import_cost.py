"""What `import shim` and `shim.plan()` pull in. Times are measured by benchmarks/startup.py; here are the causes."""

import ast
import json
from pathlib import Path

import packaging
import pytest
from unit_helpers import BROKEN, REPOSITORY, megatron, output_of

LOADED = """
    import json, os, sys
    before = set(sys.modules)
    {code}
    print(json.dumps(sorted(set(sys.modules) - before)))
"""
# Frameworks that cost seconds, and parts of the standard library that cost more than all of shim.
HEAVY = {"torch", "megatron", "transformer_engine", "numpy", "triton", "asyncio", "multiprocessing", "pkg_resources"}
HEAVY |= {"unittest", "http", "ssl", "xml", "concurrent", "pydoc", "setuptools", "hypothesis", "pytest", "sqlite3"}


def loaded(code, *directories, **arguments):
    return set(json.loads(output_of(LOADED.format(code=code), *directories, **arguments).splitlines()[-1]))


def test_import_shim_costs_about_nothing():
    """Every process of a job imports it, whether it uses it or not; -S, because site-packages import things too."""
    found = loaded("import shim", flags=["-S"])
    assert found <= {"shim", "__future__"}


def test_dir_and_unknown_names_load_nothing_either():
    """Tools that look at modules must not set anything off."""
    code = "import shim; dir(shim); hasattr(shim, '__wrapped__'); assert not hasattr(shim, 'no_such_name')"
    assert loaded(code, flags=["-S"]) <= {"shim", "__future__"}


@pytest.mark.parametrize("call", ["shim.plan()", "shim.status()", "shim.explain('mtp-packed-sequences')"])
def test_a_plan_loads_neither_frameworks_nor_heavy_parts_of_the_standard_library(tmp_path, call):
    """It parses a few files; what it is made for is never imported."""
    root = megatron(tmp_path, "0.16.0", {"roll.py": BROKEN})
    found = loaded(f"import shim; {call}", root)
    assert "shim._planning.plan" in found
    assert not {name.partition(".")[0] for name in found} & HEAVY
    # Patch modules import torch, and are loaded when a target is.
    assert not {name for name in found if name.startswith(("shim.patches.", "shim.ops", "shim.testing"))}


@pytest.mark.parametrize("call", ["shim.plan()", "shim.apply()", "shim.status()"])
def test_a_plan_on_a_known_release_loads_what_it_needs_and_no_more(tmp_path, call):
    """Each of these takes longer to import than a plan takes, or nearly so; whoever needs one imports it where it is
    needed. Nothing is installed here, and what tools put into site-packages is not loaded with -S. What packaging loads
    itself does not count."""
    slow = {"yaml", "zipfile", "difflib", "importlib.abc", "packaging.specifiers", "importlib.metadata"}
    slow |= {"shim._te.features", "shim._matrix.rules", "shim._matrix.pins"}
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "packaging").symlink_to(Path(packaging.__file__).parent)
    theirs = loaded("import packaging.version", packages, flags=["-S"])
    assert not (loaded(f"import shim; {call}", packages, flags=["-S"]) - theirs) & slow


def test_every_public_name_resolves():
    """__all__, the lazy names and the type checker's imports are the same set."""
    code = """
        import shim
        for name in shim.__all__:
            assert getattr(shim, name).__module__.startswith("shim."), name
            assert name in dir(shim)
        from shim import _api
        assert set(shim._HOMES) | set(_api.__all__) == set(shim.__all__)
        assert shim.__version__.count(".") >= 2
        from shim import *
        assert apply is shim.apply
    """
    output_of(code)


def test_one_module_of_the_engine_holds_state():
    """A second copy of state would be a second truth: elsewhere, modules make no objects that can change."""
    made = set()
    for path in (REPOSITORY / "shim" / "_engine").glob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            value = getattr(node, "value", None)
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(value, (ast.Call, ast.Dict, ast.Set)):
                made.add((path.name, ast.unparse(value).partition("(")[0].partition("{")[0]))
    constants = {
        ("chains.py", "TypeVar"),
        ("names.py", "_Missing"),
        ("names.py", "frozenset"),
        ("log.py", "logging.getLogger"),
        ("models.py", ""),
        ("ranks.py", ""),
        ("states.py", ""),
    }
    assert made - constants == {("engine.py", "Engine")}


def test_shim_run_loads_no_other_command_and_no_engine():
    """It runs in front of each job, and binds nothing itself."""
    call = "from shim._tools import cli, run; sys.argv[1:] = ['run', '--']; assert cli.main() == cli.USAGE"
    found = loaded(call)
    ours = {name for name in found if name.startswith(("shim._tools.", "shim._engine", "shim._api", "shim._archives"))}
    assert ours == {f"shim._tools.{name}" for name in ("arguments", "cli", "output", "progress", "run", "terminal")}
