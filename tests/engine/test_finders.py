"""plan() asks no finder that may import: only Python's own, and the tables of editable installations."""

import importlib.util
import sys
import types

import pytest

import shim
from shim._releases.sources import Sources, find_spec

CORE = "megatron.core."


class Importing:
    """Imports the parents of what it is asked for, as the finders of post-import hooks do."""

    def __init__(self):
        self.asked = []

    def find_spec(self, name, path=None, target=None):
        if name.startswith(CORE) and name not in self.asked:
            self.asked.append(name)
            return importlib.util.find_spec(name)
        return None


@pytest.fixture
def unloaded(world):
    world.patch("p", [CORE + "ops:double", CORE + "layers:Layer.forward"])
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]
    return world


def test_a_finder_that_imports_is_not_asked(unloaded):
    finder = Importing()
    sys.meta_path.insert(0, finder)
    assert shim.plan()["p"].action == "apply"
    assert finder.asked == [] and not any(name.startswith("megatron") for name in sys.modules)
    assert unloaded.get("ops:double")(2) == 4
    assert finder.asked  # by the import


def test_post_import_hooks_of_wrapt_import_nothing_at_plan_time(unloaded, monkeypatch):
    """What it has hooks for, its finder imports with all parents when it is asked."""
    wrapt = pytest.importorskip("wrapt")
    called = []
    monkeypatch.setattr(wrapt.importer, "_post_import_hooks", {})
    wrapt.register_post_import_hook(called.append, CORE + "ops")
    assert shim.plan()["p"].action == "apply"
    assert called == [] and CORE.rstrip(".") not in sys.modules
    shim.apply()
    assert unloaded.get("ops:double")(2) == ("p", 4)
    assert len(called) == 1


class AskingAll:
    """Asks all other finders, as those of coverage tools do that wrap every loader."""

    def __init__(self):
        self.wrapped = []

    def find_spec(self, name, path=None, target=None):
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self.wrapped.append(name)
                    return spec
        return None


@pytest.mark.parametrize("turn", ["before", "after"])
def test_a_finder_may_ask_all_others(unloaded, turn):
    """It stands in front of shim's or behind it; the module is looked for once, patched, and given back."""
    finder = AskingAll()
    if turn == "before":
        sys.meta_path.insert(0, finder)
    shim.apply()
    if turn == "after":
        sys.meta_path.insert(0, finder)
    assert unloaded.get("ops:double")(2) == ("p", 4)
    assert finder.wrapped.count(CORE + "ops") == 1
    shim.revert()
    assert unloaded.get("ops:double")(2) == 4


@pytest.mark.parametrize("as_namespace", [False, True])
def test_what_setuptools_maps_is_found(tmp_path, monkeypatch, as_namespace):
    """By the finder that `pip install -e` generates where a package lies elsewhere than its name says."""
    template = pytest.importorskip("setuptools.command.editable_wheel")._finder_template
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "__init__.py").write_text("raise RuntimeError\n")
    (tmp_path / "src" / "leaf.py").write_text("x = 1\n")
    (tmp_path / "single.py").write_text("y = 2\n")
    package = "fake_editable.core" if as_namespace else "fake_editable"
    mapping = {package: str(tmp_path / "src"), "fake_single": str(tmp_path / "single")}
    name = "__editable___fake_finder"
    finder = types.ModuleType(name)
    code = template("__editable__.fake-1.0.finder", mapping, {"fake_editable": []} if as_namespace else {})
    exec(code, finder.__dict__)
    monkeypatch.setitem(sys.modules, name, finder)
    for where in ("meta_path", "path_hooks", "path"):
        monkeypatch.setattr(sys, where, list(getattr(sys, where)))
    finder.install()
    monkeypatch.setattr(finder._EditableFinder, "find_spec", None)  # its table is enough
    sources = Sources()
    assert sources.path(f"{package}.leaf") == str(tmp_path / "src" / "leaf.py")
    assert sources.path(package) == str(tmp_path / "src" / "__init__.py")
    assert sources.path("fake_single") == str(tmp_path / "single.py")
    assert find_spec(f"{package}.absent") is None and find_spec("fake_absent") is None
    assert not any(name.startswith(("fake_editable", "fake_single")) for name in sys.modules)


def test_what_editables_maps_is_found(tmp_path, monkeypatch):
    """Hatchling and PDM map top-level packages to files. The finder is a stand-in with the name and table of theirs."""
    (tmp_path / "__init__.py").write_text("raise RuntimeError\n")
    table = {"_redirections": {"fake_editable": str(tmp_path / "__init__.py")}, "__module__": "editables.redirector"}
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, type("RedirectingFinder", (), table)])
    assert Sources().path("fake_editable") == str(tmp_path / "__init__.py")
