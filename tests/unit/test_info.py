"""shim info: what is installed, what is applied, and which switches are set, on one small screen."""

import json

import pytest
from unit_helpers import BROKEN, MATRIX, PATCH, write_file

from shim._tools.cli import main
from shim._tools.info import as_text, gather


@pytest.fixture
def installed(world, monkeypatch):
    write_file(world.own / "trainer_patches" / "roll_fix.py", PATCH)
    monkeypatch.setenv("MEGATRON_SHIM_MATRIX", str(world.matrix))
    world.pin(MATRIX)
    world.install(BROKEN)
    (world.site / "megatron/core/__init__.py").write_text("")
    return world


def said(capsys, code=0, *flags):
    assert main(["info", *flags]) == code
    return capsys.readouterr().out


def rows(text):
    """Label -> what stands behind it, lines that go on joined."""
    found, last = {}, ""
    for line in text.splitlines():
        label, value = line[:14].strip(), line[14:].strip()
        last = label or last
        found[last] = f"{found.get(last, '')} {value}".strip()
    return found


def test_what_is_installed_and_what_is_applied(installed, capsys):
    found = rows(said(capsys))
    assert found["megatron-core"].startswith("0.16.0 (tested: 0.16.0 to 0.18.0)")
    assert found["TE"].startswith("not installed")
    assert found["patches"] == "2 apply"
    assert found["lock"] == "none" and found["concerns"] == "every run"
    assert found["switches"].startswith("MEGATRON_SHIM_MATRIX=")
    assert rows(as_text({**gather(), "switches": {}}))["switches"].startswith("none ")


def test_switches_count_and_are_named(installed, capsys, monkeypatch):
    monkeypatch.setenv("MEGATRON_SHIM_EXCLUDE", "roll-fix")
    monkeypatch.setenv("MEGATRON_SHIM_CONCERNS", "tp")
    found = rows(said(capsys))
    assert "MEGATRON_SHIM_EXCLUDE=roll-fix" in found["switches"] and "MEGATRON_SHIM_CONCERNS=tp" in found["switches"]
    assert "1 excluded" in found["patches"] and found["concerns"] == "tp"
    monkeypatch.setenv("MEGATRON_SHIM_DISABLE", "1")
    assert rows(said(capsys))["patches"] == "off, because MEGATRON_SHIM_DISABLE is set"


def test_a_lock_that_does_not_hold_is_a_problem(installed, capsys, monkeypatch, tmp_path):
    lock = str(tmp_path / "shim.lock")
    assert main(["pin", "--lock", lock]) == 0
    capsys.readouterr()
    monkeypatch.setenv("MEGATRON_SHIM_LOCK", lock)
    assert "problem" not in rows(said(capsys))
    monkeypatch.setenv("MEGATRON_SHIM_EXCLUDE", "roll-fix")
    found = rows(said(capsys, 1))
    assert found["problem"].startswith("this process is held to the lock") and found["lock"]


def test_drifted_patches_are_named(installed, capsys):
    installed.install(BROKEN.replace("return helper(x)", "return helper(x) + 1"))
    found = rows(said(capsys))
    assert found["to look at"] == "roll-fix: shim plan" and "1 drifted" in found["patches"]


def test_it_fits_fifteen_lines_of_eighty_columns_whatever_is_set(installed, capsys, monkeypatch, tmp_path):
    for name in ("EXCLUDE", "REQUIRE"):
        monkeypatch.setenv(f"MEGATRON_SHIM_{name}", "faster-forward")
    lock = str(tmp_path / ("x" * 90))
    assert main(["pin", "--lock", lock]) == 0
    capsys.readouterr()
    monkeypatch.setenv("MEGATRON_SHIM_LOCK", lock)
    monkeypatch.setenv("MEGATRON_SHIM_UNKNOWN", "long " * 60)
    monkeypatch.setenv(
        "MEGATRON_SHIM_CONCERNS", "tp,sp,cp,pp,ep,moe,mla,mtp,packed,lora,recompute,fp8,mamba,gdn,dsa,muon,fsdp"
    )
    installed.install(BROKEN.replace("return helper(x)", "return helper(x) + 1"))
    lines = said(capsys, 1).splitlines()
    assert len(lines) <= 15 and max(map(len, lines)) <= 80 and any("more" in line for line in lines)


def test_json_has_the_same(installed, capsys, monkeypatch):
    monkeypatch.setenv("MEGATRON_SHIM_EXCLUDE", "roll-fix")
    found = json.loads(said(capsys, 0, "--json"))
    assert found["patches"] == {"excluded": 1, "apply": 1} and found["installed"]["megatron-core"] == "0.16.0"
    assert found["switches"]["MEGATRON_SHIM_EXCLUDE"] == "roll-fix" and found["problem"] == ""
