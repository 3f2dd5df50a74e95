"""Cells: which there are, which tests run on them in `make test`, and what a run of them says."""

import os
import subprocess
import sys
from pathlib import Path

import chosen
import proof_cases
import pytest

from shim._matrix.load import load_matrix
from shim.testing import cells, releases
from shim.testing.patience import patience
from shim.testing.proof import proofs_of

TESTS = Path(__file__).parents[1]
PLACES = {
    "cells": cells.EVERYDAY,
    "cells/layouts": cells.EVERYDAY,
    "examples": cells.EVERYDAY,
    "pairs": cells.EVERYDAY_PAIRS,
}


def test_the_everyday_cells_are_supported_and_show_every_variant():
    """Also that a release is right by itself, where one is. What only commits have, their cells show."""
    matrix = load_matrix()
    assert set(cells.EVERYDAY) <= set(releases.RELEASES)
    for id, entry in matrix.patches.items():
        pins = [matrix.pins[entry.distribution][release].get(id) for release in matrix.supported[entry.distribution]]
        shown = cells.EVERYDAY_PAIRS if entry.distribution == "transformer-engine" else cells.EVERYDAY
        wanted = {(id, pin.variant) for pin in pins if pin is not None}
        assert wanted <= {found for cell in shown for found in chosen.variants_of([id], cell)}, id


def test_pairs_are_of_supported_releases():
    assert set(cells.EVERYDAY_PAIRS) < set(cells.ALL_PAIRS)
    assert len(cells.ALL_PAIRS) == len(set(cells.ALL_PAIRS)) > 9 * 13
    for pair in cells.ALL_PAIRS:
        core, engine = pair.split("+")
        assert core in releases.RELEASES and engine in releases.TE_RELEASES


@pytest.mark.parametrize("place", PLACES)
def test_a_file_says_where_it_runs(place):
    """Its patches are known, and a test that it names for a cell is there."""
    known, shown = set(load_matrix().patches), PLACES[place]
    for path in sorted((TESTS / place).glob("test_*.py")):
        assert "CELLS" in chosen.said_by(path), f"{path} has no line CELLS: see CONTRIBUTING.md"
        found, text = chosen.cells_of(path, shown), path.read_text("utf-8")
        assert set(found) <= set(shown) and "all" in found.values() and set(chosen.patches_of(path)) <= known, path
        named = {name for tests in found.values() if tests != "all" for name in tests}
        assert [name for name in named if f"\ndef {name}(" not in text] == [], path


@pytest.mark.parametrize("id", load_matrix().patches)
def test_proofs_show_every_variant_of_a_patch_and_where_it_is_not_needed(id):
    """On a CPU, in a cell or, with Transformer Engine, in a pair; each proof on one rank runs at least once."""
    patch, seen, ran = load_matrix().patches[id], set(), []
    proofs = [found for found in proofs_of(patch.module) if "cpu" in found.devices]
    core = patch.distribution == "megatron-core"
    alone = [found for found in proofs if core and not found.te]
    for some, shown in ((alone, cells.EVERYDAY), ([p for p in proofs if p not in alone], cells.EVERYDAY_PAIRS)):
        for cell, here in proof_cases.shown(id, some, shown).items():
            seen |= chosen.variants_of([id], cell) if here else set()
            ran += here
    every = cells.EVERYDAY if core else cells.EVERYDAY_PAIRS
    assert seen >= set().union(*(chosen.variants_of([id], cell) for cell in every))
    assert {found.name for found in ran} >= {found.name for found in proofs if found.ranks == 1}


@pytest.mark.parametrize("id", [id for id in load_matrix().patches if id.startswith("te-")])
def test_pairs_show_every_variant_of_what_has_to_do_with_transformer_engine(id):
    matrix = load_matrix()
    pins = matrix.pins[matrix.patches[id].distribution].values()
    wanted = {(id, pins_of[id].variant) for pins_of in pins if id in pins_of}
    assert wanted <= {found for pair in cells.EVERYDAY_PAIRS for found in chosen.variants_of([id], pair)}


class Case:
    """What `kept` asks of an item of pytest."""

    def __init__(self, path, function, *marks):
        self.path, self.originalname, self.marks = path, function, marks

    def get_closest_marker(self, name):
        return name if name in self.marks else None


def kept_on(path, shown):
    """What each of `shown` keeps of a file with a test of three cases, and with one that is marked `once`."""
    items = [*(Case(path, "three") for _ in range(3)), Case(path, "one", "once")]
    asked = chosen.cells_of(path, shown)
    return {cell: "".join(str(items.index(item)) for item in chosen.kept(items, cell, shown)) for cell in asked}


def test_a_cell_runs_all_cases_or_the_first_of_tests_that_are_named(tmp_path):
    path = tmp_path / "test_it.py"
    path.write_text('CELLS = {"b": ["three"], "a": "all", "c": "all"}\n')
    shown = ("a", "b", "c", "d")
    assert kept_on(path, shown) == {"a": "012", "b": "0", "c": "0123"}
    once = tmp_path / "test_once.py"
    once.write_text('CELLS = {"b": ["one"], "a": "all"}\n')
    assert kept_on(once, shown) == {"a": "0123", "b": ""}
    every = tmp_path / "test_every.py"
    every.write_text('CELLS = "every"\n')
    assert kept_on(every, shown) == {"a": "012", "b": "012", "c": "012", "d": "0123"}


def test_files_are_left_out_in_make_test_alone_and_on_its_cells(tmp_path, monkeypatch):
    path = tmp_path / "test_it.py"
    path.write_text('CELLS = {"0.19.2": "all", "0.12.0": ["test_stock"]}\n')
    monkeypatch.setattr(chosen, "ONCE", True)
    left = {cell: chosen.left_out(path, cell, cells.EVERYDAY) for cell in (*cells.EVERYDAY, "main")}
    assert {cell for cell, is_out in left.items() if not is_out} == {"0.12.0", "0.19.2", "main"}
    assert not chosen.left_out(tmp_path / "helper.py", "0.16.1", cells.EVERYDAY)
    monkeypatch.setattr(chosen, "ONCE", False)
    assert not any(chosen.left_out(path, cell, cells.EVERYDAY) for cell in cells.EVERYDAY)


def test_a_release_that_is_no_cell_stands_for_the_one_in_its_place(tmp_path):
    gone = next(release for release in releases.RELEASES if release not in cells.EVERYDAY)
    path = tmp_path / "test_it.py"
    path.write_text(f'CELLS = {{"{gone}": "all"}}\n')
    (found,) = chosen.cells_of(path, cells.EVERYDAY)
    matrix = load_matrix()
    assert found in cells.EVERYDAY and matrix.pins["megatron-core"][found] == matrix.pins["megatron-core"][gone]


CELL = """
import atexit, warnings
import fake_core, pytest
atexit.register(print, "said at exit")
def test_ok(): assert fake_core.VERSION
def test_release():
    warnings.warn("something is old")
    assert fake_core.VERSION != "0.13.0", "broken here"
@pytest.mark.skipif(fake_core.VERSION != "0.12.0", reason="")
def test_only_there(): pass
"""


@pytest.fixture
def cell(tmp_path):
    file = tmp_path / "test_cell.py"
    file.write_text(CELL)
    return ["-q", "-p", "no:cacheprovider", str(file)]


def test_cells_print_one_line_each_and_fail_together(pip, cell, capsys, tmp_path):
    assert cells.run_cells(["0.12.0", "0.13.0"], cell, jobs=2, log_dir=tmp_path / "logs") == 1
    printed = capsys.readouterr().out
    assert [line.split()[:4] for line in sorted(printed.splitlines()) if line.endswith(" s")] == [
        ["0.12.0", "passed", "3", "cases"],
        ["0.13.0", "failed", "2", "cases"],
    ]
    (line,) = [line for line in printed.splitlines() if line.startswith("FAILED")]
    assert line.endswith("::test_release - AssertionError: broken here")  # the reason fits into the line
    assert "UserWarning" not in printed and "said at exit" not in printed
    log = (tmp_path / "logs" / "0.13.0.log").read_text()
    assert "UserWarning" in log and "said at exit" in log
    assert "3 passed" in (tmp_path / "logs" / "0.12.0.log").read_text()


def test_cells_that_pass_return_zero(pip, cell, capsys):
    assert cells.main(["--releases", "0.12.0, 0.14.0", "--jobs", "1", "--", *cell]) == 0
    assert capsys.readouterr().out.count("passed") == 2


def test_a_cell_without_a_test_fails(pip, cell, capsys):
    assert cells.run_cells(["0.14.0"], [*cell, "-k", "only_there"]) == 1
    assert cells.run_cells(["0.14.0"], [*cell, "-k", "no_such_test"]) == 1
    assert capsys.readouterr().out.count("no test ran") == 4


def test_a_cell_that_cannot_be_fetched_fails_with_the_reason(pip, cell, capsys):
    pip.fails = True
    assert cells.run_cells(["0.14.0"], cell) == 1
    assert "no matching distribution" in capsys.readouterr().out


@pytest.fixture
def pair(tmp_path):
    """Passes where exactly the parts of the cell's name can be imported."""
    file = tmp_path / "test_pair.py"
    file.write_text(PAIR)
    return ["-q", "-p", "no:cacheprovider", str(file)]


PAIR = """
from importlib import import_module
from importlib.util import find_spec
def test_found():
    found = {name: import_module(name).VERSION for name in ("fake_core", "fake_engine") if find_spec(name)}
    raise AssertionError(f"found {found}")
"""


@pytest.mark.parametrize(
    "cell, found",
    [
        ("0.15.3", {"fake_core": "0.15.3"}),
        ("0.15.3+2.9.0", {"fake_core": "0.15.3", "fake_engine": "2.9.0"}),
        ("+2.6.0.post1", {"fake_engine": "2.6.0.post1"}),
    ],
)
def test_a_cell_runs_on_what_its_name_says(pip, pair, capsys, tmp_path, cell, found):
    assert cells.main(["--releases", cell, "--logs", str(tmp_path / "logs"), "--", *pair]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(cell) and f"found {found}" in printed
    assert (tmp_path / "logs" / f"{cell}.log").exists()


@pytest.mark.parametrize(
    "options, expected",
    [
        ([], cells.EVERYDAY),
        (["--everyday"], cells.EVERYDAY),
        (["--all"], (*releases.RELEASES, "d98e8a64dd")),
        (["--everyday-pairs"], cells.EVERYDAY_PAIRS),
    ],
)
def test_the_options_choose_the_cells(monkeypatch, options, expected):
    monkeypatch.setattr(cells, "at_hand", lambda name: name == "d98e8a64dd")
    ran = []
    monkeypatch.setattr(cells, "run_cells", lambda chosen, *_: ran.append(tuple(chosen)) or 0)
    assert cells.main([*options, "--", "tests"]) == 0
    assert ran == [expected]


def test_pairs_of_the_main_branch_are_with_every_engine_of_the_pairs(monkeypatch, capsys):
    """Once each; and where its sources are not at hand, a line says so, and nothing is downloaded."""
    pairs = ["0.18.2+2.16.1", "0.19.2+2.16.1", "0.19.2+2.20.2"]
    monkeypatch.setattr(cells, "at_hand", lambda name: True)
    assert cells.with_main(pairs) == [*pairs, f"{cells.MAIN}+2.16.1", f"{cells.MAIN}+2.20.2"]
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(cells, "at_hand", lambda name: False)
    assert cells.with_main(pairs) == pairs
    assert f"without the main branch of megatron-core: {cells.MAIN}" in capsys.readouterr().out


def test_the_main_branch_is_that_of_its_newest_commit():
    commits = load_matrix().commits["megatron-core"]
    assert max((commit.date, name) for name, commit in commits.items() if commit.of == "main")[1] == cells.MAIN


def test_the_longest_cell_of_the_last_run_comes_first(monkeypatch, tmp_path):
    """New releases before old ones where nothing is known."""
    (tmp_path / "0.12.0.log").write_text("3 passed in 99.50s (0:01:39)\n")
    (tmp_path / "0.14.0.log").write_text("3 passed in 7.10s\n")
    ran = []

    def run_cell(cell, *_):
        ran.append(cell)
        return cells.Outcome(cell, "passed", 3, 1.0, tmp_path / f"{cell}.log")

    monkeypatch.setattr(cells, "_run_cell", run_cell)
    assert cells.run_cells(["0.12.0", "0.14.0", "0.15.0", "0.16.0"], [], jobs=1, log_dir=tmp_path) == 0
    assert ran == ["0.12.0", "0.14.0", "0.16.0", "0.15.0"]


WARM = """
import sys
import warm_cells

warm_cells.LOADED = "pytest json.tool"
sys.exit(warm_cells.main())
"""
OF_A_FORK = """
import os, sys

def test_it_has_what_the_server_loaded_and_nothing_of_shim():
    assert "json.tool" in sys.modules and "shim" not in sys.modules
    assert os.environ["OMP_NUM_THREADS"] == "1" and sys.path[0] == os.getcwd()

def test_that_fails(): assert False
"""


@pytest.mark.parametrize(("chosen", "code"), [("not fails", 0), ("test", 1)])
def test_forked_cells_are_as_those_of_new_processes(tmp_path, chosen, code):
    (tmp_path / "test_it.py").write_text(OF_A_FORK)
    options = ["--releases", "torch", "--logs", str(tmp_path), "--", "-q", "test_it.py", "-k", chosen]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS / "support"), str(TESTS.parent)])}
    command = [sys.executable, "-c", WARM, *options]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=patience())
    assert done.returncode == code, done.stdout + done.stderr
    assert f"torch          {'failed' if code else 'passed'}" in done.stdout
