"""docs/trainers_run.yaml: what ran of trainers, and the two tables that are made of it."""

import pytest
from unit_helpers import REPOSITORY

from shim._errors import MatrixError
from shim.maintenance.docs_trainers import read_trainers
from shim.maintenance.docs_trainers_run import calls_table, read_runs, run_table

DATA = REPOSITORY / "docs" / "trainers_run.yaml"
FILE = """
places:
  one: {maintainer: the first line, user: a plugin}
  two: {maintainer: its worker, user: "`shim run --`"}
runs:
  - trainer: one
    scope: functions
    what: its loss
    at: "1.0"
    on: [0123456789 + 2.1.0, 0.16.1 + 2.12.0, 0.9.0 + 2.1.0]
    orders: [stock, first]
    stock: "1e-2"
    shim: "1e-7"
    says: no conflict
    lines: 3 lines go
    ends: at a.py 3
  - trainer: one
    scope: command
    what: its command
    at: "1.0"
    on: [0.16.1 + 2.12.0]
    orders: [shim run]
    stock: raises
    shim: runs
    test: tests/integration/test_one.py
"""


def written(tmp_path, old="", new=""):
    path = tmp_path / "trainers_run.yaml"
    path.write_text(FILE.replace(old, new) if old else FILE)
    return path


def test_the_trainers_are_those_of_the_other_file():
    places, _ = read_runs(DATA)
    assert [place.trainer for place in places] == [
        trainer.name for trainer in sorted(read_trainers(REPOSITORY / "docs/trainers.yaml"), key=_of(places))
    ]


def _of(places):
    names = [place.trainer for place in places]
    return lambda trainer: names.index(trainer.name)


def test_tests_that_are_named_exist():
    _, runs = read_runs(DATA)
    named = [run.test for run in runs if run.test]
    assert named and all((REPOSITORY / test).exists() for test in named)


def test_seen_names_what_ran_the_most_first_and_releases_before_commits(tmp_path):
    table = calls_table(*read_runs(written(tmp_path)))
    one, two = table.splitlines()[2:]
    seen = "its command on 0.16.1 (`shim run`); functions on 0.9.0, 0.16.1, 0123456789 (first)"
    assert one == f"| [one](#one) | the first line | a plugin | {seen} |"
    assert two == "| [two](#two) | its worker | `shim run --` | read only |"


def test_a_run_says_what_came_out_and_where_it_ends(tmp_path):
    _, runs = read_runs(written(tmp_path))
    loss, command = list(run_table(runs))[2:]
    on = "0123456789 + 2.1.0, 0.16.1 + 2.12.0, 0.9.0 + 2.1.0"
    out = "1e-2 -> 1e-7 | no conflict; 3 lines go | at a.py 3"
    assert loss == f"| one 1.0 | its loss | {on} | without shim, first | {out} |"
    assert "its command. Test: `test_one.py`." in command
    assert command.endswith("| raises -> runs | - | at its end |")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[stock, first]", "[stock, sideways]", "'sideways' is none of"),
        ("trainer: one\n    scope: command", "trainer: three\n    scope: command", "three"),
        ("scope: command", "scope: dream", "dream"),
        ("    shim: runs\n", "", "shim"),
    ],
)
def test_what_is_of_another_form_is_an_error(tmp_path, old, new, said):
    with pytest.raises(MatrixError, match=said):
        read_runs(written(tmp_path, old, new))
