"""Names that megatron-core wants of Transformer Engine: which of them a release has lost, and how that is measured."""

import json

import pytest
from audit_cases import check_markdown
from packaging.version import Version
from unit_helpers import MATRIX, write_file

from shim._matrix.load import load_matrix
from shim._te import names as _wanted
from shim._te.features import losses_of, places, remedy_for
from shim._te.names import Names
from shim._tools.audit_report import as_markdown, as_text
from shim.maintenance.te_names import measure_names, render_names

WANTED = {
    "transformer_engine.pytorch:Linear": ["2.1.0", "2.2.0", "2.3.0"],
    "transformer_engine.pytorch.attention:SplitAlongDim": ["2.1.0", "2.2.0"],
    "transformer_engine.pytorch.attention:FusedRoPE.apply": ["2.1.0"],
    "transformer_engine.pytorch.ep:dispatch": ["2.3.0"],
    "transformer_engine.pytorch:never": [],
}


@pytest.fixture
def engine(world, examine, tmp_path, monkeypatch):
    """Audit a fake Transformer Engine whose files have this text, against WANTED."""
    for release in ("2.1.0", "2.2.0", "2.3.0"):
        (world.root / "releases" / release).mkdir()
    world.pin(MATRIX.replace("\n\npatches", '\n  transformer-engine: ["2.1.0", "2.2.0", "2.3.0"]\n\npatches', 1))
    names = {name: {"wanted_by": ["0.16.0", "0.18.0"], "in": found} for name, found in WANTED.items()}
    monkeypatch.setattr(_wanted, "wanted_names", lambda: names)

    def run(version, files):
        root = tmp_path / "te"
        for name, text in {"__init__.py": "", "pytorch/__init__.py": "", **files}.items():
            write_file(root / "transformer_engine" / name, text)
        if version is not None:
            write_file(root / "build_tools/VERSION.txt", version)
        return examine(root)

    return run


def test_names_are_newly_lost_lost_before_or_not_yet_there(engine):
    """Only what the release before still had is news; the order is by urgency."""
    found = engine("2.3.0", {"pytorch/__init__.py": "class Linear: pass\n"})
    assert [(name.name.partition(":")[2], name.last_seen, name.comes_with, name.newly) for name in found.lost] == [
        ("SplitAlongDim", "2.2.0", "", True),
        ("FusedRoPE.apply", "2.1.0", "", False),
        ("dispatch", "", "2.3.0", False),
        ("never", "", "", False),
    ]
    assert found.lost[0].wanted == "0.16.0 - 0.18.0"
    assert found.clean is False


@pytest.mark.parametrize(
    ("version", "clean", "newly"), [("2.1.0", True, 0), ("2.2.0", False, 3), ("2.4.0", False, 2), (None, False, 2)]
)
def test_clean_is_about_what_is_new(engine, version, clean, newly):
    """A name that was lost long ago must not make every daily run red; the first release has nothing before it, and
    an unknown version counts as the newest."""
    found = engine(version, {})
    assert len(found.lost) == len(WANTED)
    assert (found.clean, sum(name.newly for name in found.lost)) == (clean, newly)


def test_a_member_is_lost_with_its_class(engine, monkeypatch):
    """One line for both; a class that is there can still have lost the member."""
    names = {f"transformer_engine.m:{name}": {"wanted_by": ["0.16.0"], "in": []} for name in ("C.f", "C", "D", "D.f")}
    monkeypatch.setattr(_wanted, "wanted_names", lambda: names)
    found = engine("2.3.0", {"m.py": "class D: pass\n"})
    assert [name.name.partition(":")[2] for name in found.lost] == ["C", "D.f"]


def test_lost_names_are_in_text_json_and_markdown(engine):
    """With who wants them, and where they are to be found."""
    found = engine("2.3.0", {"pytorch/__init__.py": "Linear = 1\n"})
    name = "transformer_engine.pytorch.attention:SplitAlongDim"
    assert f"  lost name: {name}, wanted by megatron-core 0.16.0 - 0.18.0, last seen in 2.2.0 (newly lost)" in as_text(
        found
    )
    assert f"| `{name}` | 0.16.0 - 0.18.0 | last seen in 2.2.0 (newly lost) |" in as_markdown(found)
    check_markdown(as_markdown(found))
    assert found.to_dict()["lost_names"][0] == {
        "name": name,
        "wanted_by": "0.16.0 - 0.18.0",
        "last_seen": "2.2.0",
        "comes_with": "",
        "newly": True,
    }


@pytest.fixture
def has(tmp_path):
    """Whether a name is there in a fake Transformer Engine."""

    def run(name, files):
        from shim._releases.sources import Sources

        for path, text in {"__init__.py": "", **files}.items():
            write_file(tmp_path / "te/transformer_engine" / path, text)
        return Names(Sources([tmp_path / "te"])).has(f"transformer_engine.{name}")

    return run


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("def wanted(): pass\n", True),
        ("async def wanted(): pass\n", True),
        ("class wanted: pass\n", True),
        ("wanted = 1\n", True),
        ("a, (b, wanted) = 1, (2, 3)\n", True),
        ("wanted: int = 1\n", True),
        ("import wanted\n", True),
        ("import numpy as wanted\n", True),
        ("from .other import there as wanted\n", True),
        ("from torch import wanted\n", True),
        ("if X:\n    wanted = 1\n", True),
        ("try:\n    from torch import wanted\nexcept ImportError:\n    pass\n", True),
        ("with x:\n    for y in z:\n        wanted = 1\n", True),
        ("from .other import *\n", False),
        ("from .stars import *\n", True),
        ("from transformer_engine.stars import *\n", True),
        ("from transformer_engine_torch import *\n", True),
        ("from torch import *\n", True),
        ("from . import gone\nfrom .gone import *\n", False),
        ("from .m import *\n", False),
        ("def f():\n    wanted = 1\n", False),
        ("x.wanted = 1\nprint(wanted)\n", False),
        ("'''\nwanted = 1\n'''\n", False),
        ("", False),
        ("def wanted(:\n", False),
    ],
)
def test_a_name_is_there_where_an_import_would_find_it(has, text, there):
    """Defined, imported or passed on; what comes from the compiled extension or elsewhere counts as there."""
    files = {"m.py": text, "other.py": "there = 1\n", "stars.py": "from .deep import *\n", "deep.py": "wanted = 1\n"}
    assert has("m:wanted", files) is there


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("class C:\n    def f(self): pass\n", True),
        ("class C(object):\n    f = 1\n", True),
        ("class C:\n    if X:\n        f = 1\n", True),
        ("class C:\n    def g(self): self.f = 1\n", False),
        ("class C(object): pass\n", False),
        ("class C(Base): pass\n", True),
        ("C = make()\n", True),
        ("from .other import C\n", True),
        ("from .other import D as C\n", False),
        ("from .other import *\n", True),
        ("from torch import C\n", True),
    ],
)
def test_members_of_classes_are_looked_for(has, text, there):
    """Through imports as well; what a base class may have counts as there."""
    other = "class C:\n    def f(self): pass\nclass D:\n    def g(self): pass\n"
    assert has("m:C.f", {"m.py": text, "other.py": other}) is there


def test_submodules_are_names(has):
    """`from transformer_engine.pytorch import ep` imports a module; a member is then looked for in there."""
    files = {"pytorch/__init__.py": "", "pytorch/ep.py": "def dispatch(): pass\n"}
    assert has("pytorch:ep", files)
    assert has("pytorch:ep.dispatch", files)
    assert not has("pytorch:ep.combine", files)


def test_what_megatron_imports_is_measured(tmp_path):
    """Plain, relative to an alias, guarded and inside functions; what it does not use is left out."""
    text = """
        import transformer_engine as te
        import transformer_engine.pytorch.fp8
        try:
            from transformer_engine.pytorch.attention import SplitAlongDim as Split, rope
            from transformer_engine.pytorch import *
        except ImportError:
            pass

        def f():
            from transformer_engine.common import recipe
            recipe.DelayedScaling.make()
            te.pytorch.Linear(1).weight
            transformer_engine.pytorch.fp8.FP8GlobalStateManager.reset()
            rope.apply()
    """
    write_file(tmp_path / "mcore/megatron/core/user.py", text)
    write_file(tmp_path / "te/transformer_engine/pytorch/__init__.py", "class Linear: pass\n")
    found = measure_names([("0.16.0", tmp_path / "mcore")], [("2.1.0", tmp_path / "te")])
    assert set(found) >= {
        "transformer_engine.pytorch.attention:SplitAlongDim",
        "transformer_engine.pytorch.attention:rope",
        "transformer_engine.pytorch.attention.rope:apply",
        "transformer_engine.common:recipe",
        "transformer_engine.common.recipe:DelayedScaling.make",
        "transformer_engine.pytorch:Linear",
        "transformer_engine.pytorch.fp8:FP8GlobalStateManager.reset",
    }
    assert found["transformer_engine.pytorch:Linear"] == {"wanted_by": ["0.16.0"], "in": ["2.1.0"]}
    assert json.loads(render_names(found)) == found


def test_releases_that_a_list_knows_are_not_read_again(tmp_path):
    """One release more is read, and the names that it alone wants are looked up everywhere."""
    for release, name in (("0.16.0", "Linear"), ("0.17.0", "Later")):
        text = f"from transformer_engine.pytorch import {name}\n"
        write_file(tmp_path / release / "megatron/core/user.py", text)
    write_file(tmp_path / "2.1.0/transformer_engine/pytorch/__init__.py", "class Linear: pass\nclass Later: pass\n")
    write_file(tmp_path / "2.2.0/transformer_engine/pytorch/__init__.py", "class Later: pass\n")
    megatrons, engines = [[(r, tmp_path / r) for r in rs] for rs in (("0.16.0", "0.17.0"), ("2.1.0", "2.2.0"))]
    every = measure_names(megatrons, engines)
    assert [found["in"] for found in every.values()] == [["2.1.0", "2.2.0"], ["2.1.0"]]
    before = measure_names(megatrons[:1], engines[:1])
    (tmp_path / "0.16.0/megatron/core/user.py").unlink()
    assert measure_names(megatrons, engines, before) == every


def test_the_shipped_list_of_names_belongs_to_the_supported_releases():
    """It is written by `shim pin`; after a change of the supported list it is stale."""
    supported = load_matrix().supported
    names = json.loads(_wanted.FILE.read_text("utf-8"))
    assert names and _wanted.FILE.read_text("utf-8") == render_names(names)
    assert {r for found in names.values() for r in found["wanted_by"]} == set(supported["megatron-core"])
    assert {r for found in names.values() for r in found["in"]} == set(supported["transformer-engine"])


def test_the_losses_of_a_pair_are_told_without_an_installation():
    """Of names, but for those that megatron-core gets by without, and of drifts."""
    core, te = Version("0.17.1"), Version("2.7.0")
    found = {feature.name: feature for feature in losses_of(core, te)}
    names = {name for name in places(core, te) if (remedy_for(name, core) or {"remedy": ""})["remedy"] != "unneeded"}
    drifts = {"transformer_engine.pytorch.cpu_offload:get_cpu_offload_context"}
    assert found.keys() == names | drifts and not any(feature.fixed for feature in found.values())
    assert found[drifts.pop()].patch == "te-cpu-offload"
    assert losses_of(Version("0.11.0"), te) == ()
