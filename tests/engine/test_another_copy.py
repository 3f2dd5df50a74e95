"""A package that is imported from another place than the plan was made for gets a plan of its own."""

import importlib
import shutil
import sys

import pytest

import shim
from shim._engine import engine

CORE = "megatron.core."
OPS = CORE + "ops"


@pytest.fixture
def warned(caplog):
    """The warnings so far, without those about single patches."""
    return lambda: [r.getMessage() for r in caplog.records if "plan is made anew" in r.getMessage()]


@pytest.fixture
def elsewhere(patched_world, tmp_path_factory, monkeypatch):
    """A second copy of the world's tree, which is not on sys.path."""
    root = tmp_path_factory.mktemp("second")
    shutil.copytree(patched_world.root / "megatron", root / "megatron")
    return root


def other_release(root):
    """Make a copy a release with another body of ops.double."""
    path = root / "megatron" / "core" / "ops.py"
    path.write_text(path.read_text().replace("x * scale", "scale * x"))
    info = root / "megatron" / "core" / "package_info.py"
    info.write_text(info.read_text().replace("MINOR = 9", "MINOR = 10"))


@pytest.mark.parametrize("demands", [{}, {"strict": True}])
def test_a_path_that_comes_late_is_planned_for(patched_world, tmp_path_factory, monkeypatch, warned, demands):
    """The package is not there at apply(). What is imported then is patched, and told in one message."""
    late = tmp_path_factory.mktemp("late")
    (patched_world.root / "megatron").rename(late / "megatron")
    assert shim.apply(**demands)["count"].state == "not-installed"
    monkeypatch.setattr(sys, "path", [*sys.path, str(late)])
    assert patched_world.get("ops:double")(2) == ("count", 4)
    assert patched_world.get("layers:Layer")().forward(1) == ("count", 2)
    report = shim.status()
    assert report["count"].state == "applied" and report.releases["megatron-core"] == "9.9.0"
    (told,) = warned()
    assert str(late) in told and f"shim.apply() at {__file__}" in told
    assert told.count("Remedy: ") == 1 and "put it on sys.path before shim.apply()" in told


@pytest.mark.parametrize("late", [True, False], ids=["past the hook", "by the hook"])
def test_another_release_that_comes_first_is_planned_for(patched_world, elsewhere, caplog, warned, late, monkeypatch):
    """One message, and no conflict with upstream's own functions of the other release."""
    other_release(elsewhere)
    shim.apply()
    monkeypatch.syspath_prepend(str(elsewhere))
    if late:
        engine.ENGINE.watch.hook.remove()
    double = patched_world.get("ops:double")
    assert double(2) == 4
    report = shim.status()
    assert report["count"].state == "drifted" and report.releases["megatron-core"] == "9.10.0"
    assert len(warned()) == 1 and "conflict" not in caplog.text
    assert str(elsewhere) in warned()[0] and str(patched_world.root) in warned()[0]


def test_the_same_release_elsewhere_is_as_good(patched_world, elsewhere, warned, monkeypatch):
    """A second copy of the planned release meets what was asked for."""
    shim.apply(require=["count"])
    monkeypatch.syspath_prepend(str(elsewhere))
    assert patched_world.get("ops:double")(2) == ("count", 4)
    assert patched_world.get("ops:double").__code__ is not None and len(warned()) == 1


@pytest.mark.parametrize("demands", [{"require": ["count"]}, {"strict": True}])
def test_another_release_that_does_not_meet_the_demands_is_an_error(patched_world, elsewhere, demands, monkeypatch):
    """The import raises each time, and leaves nothing behind. So does check(), if the import came past the hook."""
    other_release(elsewhere)
    shim.apply(**demands)
    monkeypatch.syspath_prepend(str(elsewhere))
    for _ in range(2):
        with pytest.raises(shim.NotMetError, match=r"imported from .*second.* Remedy: put it on sys.path"):
            importlib.import_module(OPS)
        assert not any(name.startswith("megatron.core") for name in sys.modules)
    engine.ENGINE.watch.hook.remove()
    importlib.import_module(OPS)
    for call in (shim.check, shim.status):
        with pytest.raises(shim.NotMetError, match="imported from"):
            call()
    assert patched_world.get("ops:double")(2) == 4
    shim.revert()
    assert shim.status()["count"].state == "drifted"  # and not that of the copy that was planned for


def test_a_lock_holds_for_what_is_imported(patched_world, elsewhere, tmp_path, monkeypatch):
    from shim._planning.lock import write_lock

    write_lock(tmp_path / "lock", shim.plan())
    other_release(elsewhere)
    shim.apply(lock=tmp_path / "lock")
    monkeypatch.syspath_prepend(str(elsewhere))
    with pytest.raises(shim.NotMetError, match="held to the lock"):
        importlib.import_module(OPS)


def test_what_is_bound_in_a_copy_that_left_is_given_back(patched_world, elsewhere, warned, monkeypatch):
    """sys.modules gets another copy: the first one has its own functions again, and the second is judged by itself."""
    first = importlib.import_module(OPS)
    original = first.double
    shim.apply()
    assert first.double is not original
    other_release(elsewhere)
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(elsewhere))
    assert importlib.import_module(OPS) is not first
    assert first.double is original and patched_world.get("ops:double")(2) == 4
    assert len(warned()) == 1


@pytest.mark.parametrize("nested", [False, True])
def test_a_block_that_meets_another_copy_ends_as_it_began(patched_world, elsewhere, nested, monkeypatch):
    other_release(elsewhere)
    if nested:
        shim.apply()
    with shim.patched():
        monkeypatch.syspath_prepend(str(elsewhere))
        assert patched_world.get("ops:double")(2) == 4
        with shim.patched():
            pass
        assert shim.status()["count"].state == "drifted"
    assert (engine.ENGINE.plan is not None) == nested
    assert shim.status()["count"].state == "drifted"


def test_a_restored_meta_path_takes_no_patch_away(patched_world):
    """A fixture restores sys.meta_path after apply(). What is imported then is bound by the next report."""
    before = list(sys.meta_path)
    shim.apply()
    sys.meta_path[:] = before
    double = patched_world.get("ops:double")
    assert double(2) == 4
    assert shim.status()["count"].targets[OPS + ":double"] == "bound"
    assert patched_world.get("ops:double")(2) == ("count", 4)
    assert patched_world.get("layers:Layer")().forward(1) == ("count", 2)  # the hook is back
    shim.revert()
    assert sys.meta_path == before


def test_nothing_is_watched_when_every_patch_is_left_out(patched_world):
    before = list(sys.meta_path)
    shim.apply(only=[])
    assert sys.meta_path == before
