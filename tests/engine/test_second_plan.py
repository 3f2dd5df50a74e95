"""A second apply() costs next to nothing where nothing has changed, and sees everything that has."""

import gc
import weakref

import pytest

import shim
from shim._releases import files as _files
from shim._releases import sources as _sources

CORE = "megatron.core."


@pytest.fixture
def parsed(world, monkeypatch):
    """The number of files parsed so far, in a list; the files of the fake world count as old enough to be known."""
    monkeypatch.setattr(_files, "SETTLED_NS", -(10**18))
    world.patch("p", [CORE + "ops:double", CORE + "layers:Layer.forward"])
    count = []
    parse = _sources.parse
    monkeypatch.setattr(_sources, "parse", lambda text: count.append(text) or parse(text))
    return count


def test_a_second_apply_parses_nothing(world, parsed):
    """Nor do plan() and status(), nor does the import of the targets."""
    shim.apply()
    assert parsed
    parsed.clear()
    assert shim.apply()["p"].state == "pending"
    world.get("layers:Layer")
    world.get("ops:double")
    shim.plan(), shim.status(), shim.revert()
    assert shim.apply()["p"].state == "applied"
    assert not parsed


@pytest.mark.parametrize("gone", [False, True])
def test_a_file_that_has_changed_is_read_again(world, parsed, gone):
    """Also one of the same size, and one that is gone."""
    assert shim.plan()["p"].action == "apply"
    path = world.root / "megatron/core/ops.py"
    if gone:
        path.unlink()
    else:
        path.write_text(path.read_text().replace("x * scale", "x - scale"))
    world.module("new", "")  # invalidates the caches of importlib
    found = shim.plan()["p"]
    assert found.action == "drifted"
    assert ("no module" if gone else "not that of any") in found.reason
    world.module("ops", "def double(x, scale=2):\n    return x * scale\n")
    assert shim.plan()["p"].action == "apply"


def test_another_copy_on_the_path_is_read(world, parsed, tmp_path, monkeypatch):
    """What is remembered is that of a file, not of a module."""
    assert shim.plan()["p"].action == "apply"
    copy = tmp_path / "copy" / "megatron" / "core"
    copy.mkdir(parents=True)
    for name in ("__init__", "package_info", "layers"):
        (copy / f"{name}.py").write_text((world.root / f"megatron/core/{name}.py").read_text())
    (copy / "ops.py").write_text("def double(x):\n    return x\n")
    monkeypatch.syspath_prepend(str(copy.parent.parent))
    assert shim.plan()["p"].action == "drifted"


def test_a_file_that_was_written_just_now_is_read_again(world, parsed, monkeypatch):
    """The clock of a file system may not have ticked between two edits."""
    monkeypatch.setattr(_files, "SETTLED_NS", 10**12)
    shim.plan()
    parsed.clear()
    shim.plan()
    assert parsed


def test_a_plan_holds_no_syntax_trees(world, parsed, monkeypatch):
    """They take a hundred times the room of all else."""
    trees = []
    parse = _sources.parse

    def watched(text):
        tree = parse(text)
        trees.append(weakref.ref(tree))
        return tree

    monkeypatch.setattr(_sources, "parse", watched)
    (world.root / "megatron/core/layers.py").write_text("class Layer: pass\n")
    made = shim.plan()
    gc.collect()
    assert made["p"].action == "drifted" and len(trees) > 1
    assert [tree() for tree in trees] == [None] * len(trees)
