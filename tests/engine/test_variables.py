"""Variables that a package reads while it is imported: set for it in time, said where they are missing, put back."""

import os
import sys

import pytest

import shim
from shim._tools import doctor as _doctor

CORE = "megatron.core."
NAME = "FAKE_OFFLOAD"
KEYS = """    options:
      set_variable: false
    variables:
      FAKE_OFFLOAD: {value: "1", before: megatron.core.late, option: set_variable, without: weights move too, RANGE}
    delete_when: never"""
ASKED = {"p": {"set_variable": True}}


@pytest.fixture
def reading(world, monkeypatch):
    """A patch whose variable is read by the module megatron.core.late."""
    monkeypatch.delenv(NAME, raising=False)
    monkeypatch.setattr("shim._matrix.rules.SETTABLE", (NAME,))
    world.module("late", f"import os\nread = os.environ.get({NAME!r})\n")
    world.patch("p", [CORE + "ops:double"])
    return write(world, 'megatron-core: ">=9.0"')


def write(world, ranges):
    world.write()
    text = world.matrix.read_text().replace("    delete_when: never", KEYS.replace("RANGE", ranges))
    world.matrix.write_text(text)
    return world


def test_it_is_there_in_time_and_gone_after_revert(reading):
    assert shim.apply(options=ASKED)["p"].holds == (f"{NAME}=1 in the environment",)
    assert reading.get("late:read") == "1"
    assert shim.revert()["p"].holds == ()
    assert NAME not in os.environ


def test_it_is_set_only_where_it_is_asked_for(reading):
    shim.apply()
    assert NAME not in os.environ
    with shim.patched(options=ASKED):
        assert os.environ[NAME] == "1"
    assert NAME not in os.environ
    shim.apply(options=ASKED, exclude=["p"])
    assert NAME not in os.environ


def test_it_is_not_set_for_releases_that_it_does_not_concern(reading):
    write(reading, 'megatron-core: "<9.0"')
    shim.apply(options=ASKED)
    assert NAME not in os.environ


@pytest.mark.parametrize("before", ["0", "1"])
def test_what_was_there_comes_back(reading, monkeypatch, before):
    monkeypatch.setenv(NAME, before)
    shim.apply(options=ASKED)
    assert os.environ[NAME] == "1"
    shim.revert()
    assert os.environ[NAME] == before


def test_what_somebody_else_has_set_meanwhile_is_left_alone(reading, monkeypatch):
    monkeypatch.setenv(NAME, "0")
    shim.apply(options=ASKED)
    os.environ[NAME] = "2"
    shim.revert()
    assert os.environ[NAME] == "2"


def test_too_late_is_said_once_with_the_remedy(reading, caplog):
    reading.get("late:read")
    for _ in range(2):
        shim.apply(options=ASKED)
    assert NAME not in os.environ
    (said,) = [record.message for record in caplog.records if NAME in record.message]
    assert "megatron.core.late was imported before FAKE_OFFLOAD=1 could be set: weights move too. Remedy:" in said


def test_an_apply_that_fails_sets_nothing(reading):
    with pytest.raises(shim.ShimError):
        shim.apply(options=ASKED, require=["p"], only=["p"], lock="no such file")
    assert NAME not in os.environ


def test_doctor_notes_where_it_is_missing(reading, monkeypatch):
    (note,) = _doctor.examine()["notes"]
    assert note.startswith("p: FAKE_OFFLOAD=1 is not set, so weights move too. Remedy: set it for the process, or call")
    assert "Notes:\n- p: FAKE" in _doctor.as_text(_doctor.examine())
    monkeypatch.setenv(NAME, "1")
    assert _doctor.examine()["notes"] == []


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
