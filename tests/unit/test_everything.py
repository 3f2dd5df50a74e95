"""The end of `make test`, and the caches of `.ci/run`."""

import subprocess

import everything
import pytest
from recording import NO_SOURCES
from unit_helpers import REPOSITORY

RECORDS = [
    {"target": "unit", "file": "tests/unit/test_a.py", "cpu": 2.0, "tests": 3},
    {"target": "unit", "file": "tests/unit/test_b.py", "cpu": 1.0, "tests": 1},
    {"target": "unit", "file": "tests/unit/test_b.py", "cpu": 1.5, "tests": 2},
    {"target": "helpers", "reason": f"{NO_SOURCES}megatron-core 0.1: no network", "skipped": "a"},
    {"target": "helpers", "reason": f"{NO_SOURCES}megatron-core 0.1: no network", "skipped": "b"},
]


def test_the_table_has_targets_and_then_files_the_dearest_first():
    lines = everything.table({"lint": (30.0, 40.0), "unit": (90.0, 60.0)}, RECORDS)
    assert [line.split() for line in lines[1:4]] == [
        ["30", "0.7", "lint"],
        ["90", "1.0", "unit"],
        ["120", "all,", "2", "minutes", "of", "one", "core"],
    ]
    assert [line.split() for line in lines[-2:]] == [
        ["2.5", "3", "unit:", "tests/unit/test_b.py"],
        ["2.0", "3", "unit:", "tests/unit/test_a.py"],
    ]


def test_one_line_says_what_was_skipped_for_want_of_sources():
    said = everything.missing(RECORDS, ["no python3.12", "no python3.12"])
    assert said == "Skipped for want of sources: 2 tests of megatron-core 0.1; no python3.12."
    assert everything.missing(RECORDS[:3], []) == "Skipped for want of sources: nothing."


@pytest.mark.parametrize("more, code", [("", 0), ("exit 3", 3)])
def test_a_target_is_measured_and_its_failure_and_its_skips_are_kept(tmp_path, monkeypatch, more, code):
    (tmp_path / "Makefile").write_text(f"one:\n\t@echo 'skipped: no clone'; echo fine; {more}\ntwo:\n\t@true\n")
    monkeypatch.setattr(everything, "TOP", tmp_path)
    spent, skipped = {}, []
    assert everything.run(("one", "two"), spent, skipped) == (["one"] if code else [])
    assert set(spent) == {"one", "two"} and skipped == ["no clone"]


@pytest.mark.parametrize("fails", [False, True])
def test_ci_begins_with_empty_caches_and_leaves_none(tmp_path, monkeypatch, fails):
    """A stand-in for make sees them, and puts something there."""
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text(
        "#!/bin/sh\n"
        "ls -A $MEGATRON_SHIM_CACHE $XDG_CACHE_HOME 2>/dev/null | grep . && exit 9\n"
        "mkdir -p $MEGATRON_SHIM_CACHE && touch $MEGATRON_SHIM_CACHE/left\n"
        'echo "$MEGATRON_SHIM_CACHE $PIP_CACHE_DIR ${SHIM_MEGATRON_GIT-unset} $*"\n'
        f"exit {5 if fails else 0}\n"
    )
    make.chmod(0o755)
    for name in ("MEGATRON_SHIM_CACHE", "XDG_CACHE_HOME", "SHIM_MEGATRON_GIT"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "earlier").touch()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("PIP_CACHE_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PATH", f"{make.parent}:/usr/bin:/bin")
    done = subprocess.run([REPOSITORY / ".ci/run"], capture_output=True, text=True)
    assert done.returncode == (5 if fails else 0), done.stderr
    cache, pips, clone, what = done.stdout.split()
    assert not cache.startswith(str(tmp_path / "MEGATRON_SHIM_CACHE")) and cache.startswith(str(tmp_path))
    assert (pips, clone, what) == (str(tmp_path / "XDG_CACHE_HOME" / "pip"), "unset", "test")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "MEGATRON_SHIM_CACHE",
        "SHIM_MEGATRON_GIT",
        "XDG_CACHE_HOME",
        "bin",
    ]
