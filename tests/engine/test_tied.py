"""What shim says and binds is about the files that this process runs, and not about those that a plan once read."""

import importlib
import importlib.util
import os
import py_compile
import shutil
import sys

import pytest
from fake_world import Model

import shim
from shim._engine import engine
from shim._engine.copies import _of_another_copy

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


def nets(world):
    return [
        at for at, f in sys.path_importer_cache.items() if type(f).__name__ == "Net" and at.startswith(str(world.root))
    ]


# Another place


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


def test_a_model_of_a_copy_that_nobody_planned_for_is_not_called_patched(patched_world, elsewhere, caplog):
    """Its classes come from a private copy, under another name or after the modules have left sys.modules."""
    shim.apply()
    patched_world.snapshot()
    spec = importlib.util.spec_from_file_location(
        "vendored.megatron.core.layers", elsewhere / "megatron" / "core" / "layers.py"
    )
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    report = shim.check(Model(copy.Layer()))
    assert report["count"].state == "unknown" and str(elsewhere) in report["count"].reason
    assert shim.check(Model(patched_world.get("layers:Layer")()))["count"].state == "applied"


def test_a_module_that_has_the_name_of_another_package_is_no_copy_of_that(patched_world):
    """megatron-core's layers of Transformer Engine are in megatron.core.extensions.transformer_engine."""
    patched_world.module("extensions/transformer_engine", "class Linear:\n    def forward(self): pass\n")
    name = CORE + "extensions.transformer_engine"
    model = Model(importlib.import_module(name).Linear())
    assert not list(_of_another_copy([model], "transformer_engine", None))
    assert list(_of_another_copy([model], "megatron.core", None))  # none is installed where the plan looked
    assert not list(_of_another_copy([model], "megatron.core", str(patched_world.root / "megatron" / "core")))


def test_a_model_is_never_of_a_release_that_is_not_installed(patched_world, tmp_path_factory):
    layer = patched_world.get("layers:Layer")()
    (patched_world.root / "megatron").rename(tmp_path_factory.mktemp("gone") / "megatron")
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    assert shim.apply()["count"].state == "not-installed"
    assert shim.check(Model(layer))["count"].state == "unknown"


# Another content


def in_place(path):
    path.write_text(path.read_text().replace("x * scale", "scale * x"))


def same_size_and_time(path):
    before = path.stat()
    in_place(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def renamed_over(path):
    new = path.with_suffix(".new")
    new.write_text(path.read_text().replace("x * scale", "scale * x"))
    new.replace(path)


EDITS = [in_place, same_size_and_time, renamed_over]


@pytest.fixture(params=["settled", "new"])
def file(request, patched_world, monkeypatch):
    """The file of ops. Its stamp is known, or it is too new to have one."""
    if request.param == "settled":
        monkeypatch.setattr("shim._releases.files.SETTLED_NS", -1)
    return patched_world.root / "megatron" / "core" / "ops.py"


@pytest.mark.parametrize("edit", EDITS)
def test_a_file_that_is_edited_before_its_import_is_read_anew(patched_world, file, warned, edit):
    shim.apply()
    edit(file)
    assert patched_world.get("ops:double")(2) == 4
    assert shim.status()["count"].state == "drifted"
    (told,) = warned()
    assert f"{file} has changed since it was read for shim.apply() at" in told and told.count("Remedy: ") == 1


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("demands", [{"require": ["count"]}, {"strict": True}])
def test_an_edited_file_that_does_not_meet_the_demands_is_an_error(patched_world, file, edit, demands):
    shim.apply(**demands)
    edit(file)
    for _ in range(2):
        with pytest.raises(shim.NotMetError, match=r"ops\.py has changed since"):
            importlib.import_module(OPS)
        assert OPS not in sys.modules


def test_an_edit_that_is_taken_back_is_none(patched_world, file, warned):
    shim.apply(strict=True)
    before = file.read_text()
    in_place(file)
    file.write_text(before)
    assert patched_world.get("ops:double")(2) == ("count", 4)
    assert warned() == []


def test_a_comment_does_not_cost_the_patch(patched_world, file, warned):
    shim.apply(strict=True)
    file.write_text("# a comment\n" + file.read_text())
    assert patched_world.get("ops:double")(2) == ("count", 4)
    assert len(warned()) == 1 and shim.status()["count"].targets[OPS + ":double"] == "bound"


def test_what_a_patch_relies_on_is_compared_too(world, warned):
    world.patch("reads", [CORE + "layers:Layer.forward"], reads=[OPS + ":double"])
    shim.apply()
    in_place(world.root / "megatron" / "core" / "ops.py")
    importlib.import_module(OPS)
    assert len(warned()) == 1 and shim.status()["reads"].state == "drifted"


def test_an_edit_after_the_import_changes_nothing_that_is_said(patched_world, file, warned):
    """What runs is what was read when it ran. A second apply() does not judge it by a text that never ran."""
    shim.apply()
    patched_world.snapshot()
    in_place(file)
    assert shim.status()["count"].state == "applied"
    report = shim.apply(strict=True)
    assert report["count"].state == "applied" and "known" in report["count"].reason
    assert warned() == []


def test_a_reload_runs_the_edited_file(patched_world, file, warned):
    shim.apply()
    patched_world.snapshot()
    in_place(file)
    module = importlib.reload(sys.modules[OPS])
    assert module.double(2) == 4 and len(warned()) == 1
    assert shim.status()["count"].state == "drifted"


def test_a_file_that_is_edited_while_it_runs_is_not_called_known(patched_world, file, warned):
    """Nobody knows what ran: the patch is left out."""
    path = str(file)
    text = file.read_text() + f"\n\nwith open({path!r}, 'a') as me:\n    me.write('# again')\n"
    file.write_text(text)
    shim.apply()
    assert patched_world.get("ops:double")(2) == 4
    assert shim.status()["count"].state == "drifted"
    assert "changed during its import" in warned()[0] and len(warned()) == 1


# Byte code


@pytest.mark.parametrize("checked", ["unchecked hash", "time and size"])
def test_byte_code_of_another_source_is_noticed(patched_world, warned, monkeypatch, checked):
    """Python runs it in the place of the source that the plan has read."""
    file = patched_world.root / "megatron" / "core" / "ops.py"
    good = file.read_text()
    before = file.stat()
    file.write_text(good.replace("x * scale", "scale * x"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    hashed = py_compile.PycInvalidationMode.UNCHECKED_HASH
    plain = py_compile.PycInvalidationMode.TIMESTAMP
    cached = py_compile.compile(str(file), invalidation_mode=hashed if checked == "unchecked hash" else plain)
    file.write_text(good)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    monkeypatch.setattr("shim._engine.bytecode._SETTLED", -(10**9))
    shim.apply()
    assert patched_world.get("ops:double")(2) == 4
    report = shim.status()
    assert report["count"].state == "drifted"
    (told,) = warned()
    assert f"runs {cached}" in told and f"Remedy: remove {cached}" in told
    os.unlink(cached)
    importlib.reload(sys.modules[OPS])
    assert shim.apply()["count"].state == "pending" and patched_world.get("ops:double")(2) == ("count", 4)


@pytest.mark.parametrize("hashed", [True, False])
def test_byte_code_of_this_source_is_fine(patched_world, warned, monkeypatch, hashed):
    file = patched_world.root / "megatron" / "core" / "ops.py"
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH if hashed else py_compile.PycInvalidationMode.TIMESTAMP
    py_compile.compile(str(file), invalidation_mode=mode)
    monkeypatch.setattr("shim._engine.bytecode._SETTLED", -(10**12))
    shim.apply(strict=True)
    assert patched_world.get("ops:double")(2) == ("count", 4) and warned() == []


# Ways past the hook


def test_a_restored_meta_path_does_not_take_the_patches_away(patched_world):
    """A fixture restores sys.meta_path after apply(). What is imported then is patched all the same."""
    before = list(sys.meta_path)
    shim.apply()
    sys.meta_path[:] = before
    assert patched_world.get("ops:double")(2) == ("count", 4)
    assert patched_world.get("layers:Layer")().forward(1) == ("count", 2)
    shim.revert()
    assert sys.meta_path == before


def test_a_finder_in_front_hides_no_import(patched_world):
    """It finds a target by Python's own finder: patched at once, and the hook is in front from then on."""
    finder = next(f for f in sys.meta_path if getattr(f, "__name__", "") == "PathFinder")
    shim.apply()
    sys.meta_path.insert(0, finder)
    assert patched_world.get("ops:double")(2) == ("count", 4)
    assert getattr(sys.meta_path[0], "is_shim_finder", False)
    shim.revert()
    assert sys.meta_path[0] is finder


def test_the_net_leaves_no_trace(patched_world):
    """revert() leaves sys.path_importer_cache as it was, and pkgutil and invalidate_caches() work meanwhile."""
    import pkgutil

    importlib.import_module("megatron.core.other")
    place = str(patched_world.root / "megatron" / "core")
    before = dict(sys.path_importer_cache)
    names = sorted(m.name for m in pkgutil.iter_modules([place]))
    shim.apply()
    assert nets(patched_world)
    assert sorted(m.name for m in pkgutil.iter_modules([place])) == names
    patched_world.module("fresh", "x = 1")
    importlib.invalidate_caches()
    assert patched_world.get("fresh:x") == 1 and patched_world.get("ops:double")(2) == ("count", 4)
    shim.revert()
    now = sys.path_importer_cache
    assert all(now[key] is before[key] for key in before.keys() & now.keys())
    assert not nets(patched_world)


def test_nothing_is_watched_when_every_patch_is_left_out(patched_world):
    before = list(sys.meta_path)
    shim.apply(only=[])
    assert sys.meta_path == before
    assert not nets(patched_world)
