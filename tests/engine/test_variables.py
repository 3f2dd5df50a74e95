"""The variable that Transformer Engine reads at its import: set in time, said if it is missing, put back."""

import os
import sys
import types

import pytest
from packaging.version import Version
from unit_helpers import REPOSITORY

import shim
from shim._tools import doctor as _doctor
from shim.patches.megatron_core.te_cpu_offload.notes import notes

CORE = "megatron.core."
NAME = "NVTE_CPU_OFFLOAD_V1"
ASKED = {"p": {"set_variable": True}}
PATCH = """
    from fake_patches.variable import Variable
    from shim._resources import Bindings

    VARIABLE = Variable()


    def bindings(variant, options):
        resources = [VARIABLE.resource()] if options["set_variable"] else []
        return Bindings(dict.fromkeys(TARGETS, lambda original: original), *resources)
    """


@pytest.fixture
def reading(world, monkeypatch):
    """A patch whose variable is read by the package megatron.core.late."""
    monkeypatch.delenv(NAME, raising=False)
    world.module("late/__init__", f"import os\nread = os.environ.get({NAME!r})\n")
    world.module("late/cpu_offload_v1", "")
    folder = REPOSITORY / "patches" / "megatron_core" / "te_cpu_offload"
    (world.root / "fake_patches" / "variable.py").write_text((folder / "variable.py").read_text())
    world.patch("p", [CORE + "ops:double"], PATCH, options={"set_variable": "false"})
    text = world.matrix.read_text()
    world.matrix.write_text(text.replace("    delete_when: never", f"    before: [{CORE}late]\n    delete_when: never"))
    return world


def test_it_is_there_in_time_and_gone_after_revert(reading):
    shim.apply(options=ASKED)
    assert reading.get("late:read") == "1"
    assert shim.status()["p"].holds == (f"{NAME}=1 in the environment",)
    assert shim.revert()["p"].holds == ()
    assert NAME not in os.environ


def test_it_is_set_only_where_it_is_asked_for(reading):
    for arguments in ({}, {"options": ASKED, "exclude": ["p"]}):
        shim.apply(**arguments)
        assert reading.get("late:read") is None
        del sys.modules[CORE + "late"]
    with shim.patched(options=ASKED):
        assert reading.get("late:read") == "1"
    assert NAME not in os.environ


def test_it_is_not_set_for_releases_that_it_does_not_concern(reading):
    (reading.root / "megatron" / "core" / "late" / "cpu_offload_v1.py").unlink()
    shim.apply(options=ASKED)
    assert reading.get("late:read") is None


@pytest.mark.parametrize("before", ["0", "1"])
def test_what_was_there_comes_back(reading, monkeypatch, before):
    monkeypatch.setenv(NAME, before)
    shim.apply(options=ASKED)
    assert reading.get("late:read") == "1"
    shim.revert()
    assert os.environ[NAME] == before


def test_what_somebody_else_has_set_meanwhile_is_left_alone(reading, monkeypatch):
    monkeypatch.setenv(NAME, "0")
    shim.apply(options=ASKED)
    assert reading.get("late:read") == "1"
    os.environ[NAME] = "2"
    shim.revert()
    assert os.environ[NAME] == "2"


def test_too_late_is_said_once_with_the_remedy(reading, monkeypatch, caplog):
    reading.get("late:read")
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.cpu_offload", types.SimpleNamespace(**{NAME: False}))
    for _ in range(2):
        shim.apply(options=ASKED)
        shim.revert()
    assert NAME not in os.environ
    (said,) = [record.message for record in caplog.records if NAME in record.message]
    assert said.startswith(
        "te-cpu-offload: transformer_engine.pytorch was imported before NVTE_CPU_OFFLOAD_V1=1 could be"
    )
    assert "Remedy: call shim.apply() earlier, or start" in said


def test_an_apply_that_fails_sets_nothing(reading):
    with pytest.raises(shim.ShimError):
        shim.apply(options=ASKED, require=["p"], only=["p"], lock="no such file")
    assert reading.get("late:read") is None


def test_the_last_that_asks_takes_it_back(reading):
    """Another option makes the factories anew, before those of the earlier ones are dropped."""
    reading.patch("p", [CORE + "ops:double"], PATCH, options={"set_variable": "false", "size": 1})
    text = reading.matrix.read_text()
    reading.matrix.write_text(
        text.replace("    delete_when: never", f"    before: [{CORE}late]\n    delete_when: never")
    )
    shim.apply(options=ASKED)
    assert reading.get("late:read") == "1"
    shim.apply(options={"p": {"set_variable": True, "size": 2}})
    assert os.environ[NAME] == "1"
    shim.revert()
    assert NAME not in os.environ


def test_doctor_notes_where_it_is_missing(reading, monkeypatch):
    """By a file notes.py in the folder of the patch; of releases that read the variable."""
    package = reading.root / "fake_patches" / "p"
    package.mkdir()
    (reading.root / "fake_patches" / "p.py").rename(package / "__init__.py")
    (package / "notes.py").write_text("def notes(versions):\n    return [f'{versions[\"megatron-core\"]} lacks it']\n")
    assert _doctor.examine()["notes"] == ["p: 9.9.0 lacks it"]
    assert "Notes:\n- p: 9.9.0 lacks it" in _doctor.as_text(_doctor.examine())


@pytest.mark.parametrize(("version", "setting", "noted"), [("2.10", "", 1), ("2.9.1", "", 0), ("2.20.2", "1", 0)])
def test_the_note_names_the_variable(monkeypatch, version, setting, noted):
    monkeypatch.setenv(NAME, setting)
    found = list(notes({"transformer-engine": Version(version)}))
    assert len(found) == noted and list(notes({})) == []
    assert all(note.startswith(f"{NAME}=1 is not set, so a model with") and "Remedy: set it" in note for note in found)


def test_check_asks_the_patch_what_keeps_it_from_its_effect(reading, caplog):
    """A patch module may have `problems(models)`: the patch is inactive then, and an error where it is required."""

    class Model:
        def modules(self):
            return [self]

    reading.get("ops:double")
    shim.apply()
    module = sys.modules["fake_patches.p"]
    module.problems = lambda models: [("the flag is off", "switch it on")] if models else []
    found = shim.check(Model())["p"]
    assert (found.state, found.reason, found.remedy) == ("inactive", "the flag is off", "switch it on")
    assert "p is inactive: the flag is off. Remedy: switch it on." in caplog.text
    assert shim.check()["p"].state == "applied"
    shim.apply(require=["p"])
    with pytest.raises(shim.NotMetError, match="inactive"):
        shim.check(Model())
